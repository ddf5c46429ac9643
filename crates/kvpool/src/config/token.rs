//! The join token: the shared secret in every hello. It comes from a file or from `KVPOOL_JOIN_TOKEN`, never from a flag,
//! where every user of the machine could read it, and it is never printed.

use std::path::Path;

use anyhow::Result;
use kvpool_proto::JoinToken;
use rand::RngExt;

use crate::exit::usage;

/// The variable that holds the token itself.
pub const VARIABLE: &str = "KVPOOL_JOIN_TOKEN";
/// Shortest and longest token, in bytes.
const LENGTHS: std::ops::RangeInclusive<usize> = 8..=256;

/// The token of this process: from `file` where one is named, else from the environment.
pub fn resolve(file: Option<&Path>) -> Result<JoinToken> {
    let (token, origin) = match file {
        Some(path) => (read(path)?, format!("--join-token-file {}", path.display())),
        None => match std::env::var(VARIABLE) {
            Ok(token) => (token, VARIABLE.to_owned()),
            Err(_) => {
                return Err(usage(format!(
                    "no join token: name a file with --join-token-file (or KVPOOL_JOIN_TOKEN_FILE), or set {VARIABLE}; \
                     it is the same secret for every process of a pool"
                )));
            }
        },
    };
    check(token.trim(), &origin)
}

fn read(path: &Path) -> Result<String> {
    let wrong = |e: String| usage(format!("failed to read --join-token-file {}: {e}", path.display()));
    let size = std::fs::metadata(path).map_err(|e| wrong(e.to_string()))?.len();
    if size > 2 * *LENGTHS.end() as u64 {
        return Err(wrong(format!("{size} bytes is too long for a token")));
    }
    std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))
}

fn check(token: &str, origin: &str) -> Result<JoinToken> {
    let visible = token.bytes().all(|b| b.is_ascii_graphic());
    token
        .parse()
        .ok()
        .filter(|_| visible && LENGTHS.contains(&token.len()))
        .ok_or_else(|| {
            usage(format!(
                "the join token of {origin} must be {} to {} visible ASCII characters without spaces",
                LENGTHS.start(),
                LENGTHS.end()
            ))
        })
}

/// A new random token of 256 bits.
pub fn generate() -> String {
    let bytes: [u8; 32] = rand::rng().random();
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_file_is_trimmed_and_checked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "a-good-token\n").unwrap();
        assert_eq!(resolve(Some(&path)).unwrap().reveal(), "a-good-token");
        for bad in ["short", "has a space in it", &"x".repeat(257)] {
            std::fs::write(&path, bad).unwrap();
            let error = resolve(Some(&path)).unwrap_err().to_string();
            assert!(error.contains("join token") && !error.contains(bad), "{error}");
        }
        let error = resolve(Some(&dir.path().join("none"))).unwrap_err().to_string();
        assert!(error.contains("--join-token-file"), "{error}");
    }

    #[test]
    fn generated_tokens_pass_the_check_and_differ() {
        assert!(check(&generate(), "test").is_ok());
        assert_ne!(generate(), generate());
    }
}
