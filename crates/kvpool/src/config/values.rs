//! Values that settings are made of, each with one spelling for flags, environment and TOML. Every parse error says what
//! is expected and shows an example.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A size in bytes, written as `134217728`, `128MiB` or `0.5 GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

/// A unit's name in lower case and its bytes.
const UNITS: [(&str, u64); 9] = [
    ("", 1),
    ("b", 1),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected a size such as 128MiB, 2GiB or 134217728 bytes, got `{text}`");
        let text = text.trim();
        let split = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let unit = unit.trim().to_ascii_lowercase();
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(*factor).map(ByteSize).ok_or_else(wrong);
        }
        let fraction = number.parse::<f64>().map_err(|_| wrong())? * *factor as f64;
        if fraction.is_finite() && (0.0..9.0e15).contains(&fraction) {
            Ok(ByteSize(fraction as u64))
        } else {
            Err(wrong())
        }
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Raw {
            Bytes(u64),
            Text(String),
        }
        match Raw::deserialize(from) {
            Ok(Raw::Bytes(bytes)) => Ok(ByteSize(bytes)),
            Ok(Raw::Text(text)) => text.parse().map_err(serde::de::Error::custom),
            Err(_) => Err(serde::de::Error::custom(
                "expected a size such as \"128MiB\" or 134217728",
            )),
        }
    }
}

impl fmt::Display for ByteSize {
    /// In the largest binary unit that leaves at least 1, with one decimal where it is not whole.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, bytes) in [
            ("TiB", 1u64 << 40),
            ("GiB", 1 << 30),
            ("MiB", 1 << 20),
            ("KiB", 1 << 10),
        ] {
            if self.0 >= bytes {
                return if self.0.is_multiple_of(bytes) {
                    write!(f, "{}{unit}", self.0 / bytes)
                } else {
                    write!(f, "{:.1}{unit}", self.0 as f64 / bytes as f64)
                };
            }
        }
        write!(f, "{}B", self.0)
    }
}

/// An address to listen on: `IP:PORT`, or `localhost:PORT` for 127.0.0.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ListenAddr(pub SocketAddr);

impl FromStr for ListenAddr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ip_form = match text.strip_prefix("localhost:") {
            Some(port) => format!("127.0.0.1:{port}"),
            None => text.to_owned(),
        };
        ip_form
            .parse()
            .map(ListenAddr)
            .map_err(|_| format!("expected IP:PORT to listen on, such as 127.0.0.1:7400, got `{text}`"))
    }
}

/// A coordinator of the Raft group: `ID=HOST:PORT`, for example `1=127.0.0.1:7400`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Member {
    pub id: u64,
    /// Its gRPC address, `host:port`.
    pub endpoint: String,
}

impl FromStr for Member {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected ID=HOST:PORT, such as 1=127.0.0.1:7400, got `{text}`");
        let (id, endpoint) = text.split_once('=').ok_or_else(wrong)?;
        let id = id.trim().parse().map_err(|_| wrong())?;
        let endpoint = endpoint.parse::<Endpoint>().map_err(|_| wrong())?.0;
        Ok(Member { id, endpoint })
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.id, self.endpoint)
    }
}

/// An address to connect to: `HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Endpoint(pub String);

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected HOST:PORT, such as 127.0.0.1:7400, got `{text}`");
        let text = text.trim();
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let port: u16 = port.parse().map_err(|_| wrong())?;
        if host.is_empty() || host.contains(['/', ' ', '@', ',']) || port == 0 {
            return Err(wrong());
        }
        Ok(Endpoint(text.to_owned()))
    }
}

/// Serde goes through the text form, so that a flag, a variable and a TOML string are one syntax.
macro_rules! text_form {
    ($($name:ident => $show:expr),*) => {$(
        impl TryFrom<String> for $name {
            type Error = String;
            fn try_from(text: String) -> Result<Self, String> { text.parse() }
        }
        impl From<$name> for String {
            fn from(value: $name) -> String { $show(value) }
        }
    )*};
}

text_form!(
    ListenAddr => |v: ListenAddr| v.0.to_string(),
    Member => |v: Member| v.to_string(),
    Endpoint => |v: Endpoint| v.0
);

/// Preset of all Raft, lease and heartbeat times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Timing {
    /// Heartbeat 100 ms, election 250-500 ms, a silent shard is Down after 3 s.
    #[default]
    Normal,
    /// Heartbeat 250 ms, election 750-1500 ms, Down after 8 s: for starved machines and most tests.
    Relaxed,
}

impl Timing {
    /// The word on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Timing::Normal => "normal",
            Timing::Relaxed => "relaxed",
        }
    }
}
