//! Exit codes, the same for every command: 0 done, 1 failed (or degraded, for `status`), 2 wrong usage, 3 no coordinator
//! answered.

use std::fmt;

pub const FAILED: u8 = 1;
pub const USAGE: u8 = 2;
pub const UNREACHABLE: u8 = 3;

/// An error with the exit code it ends the process with.
#[derive(Debug)]
pub struct Exit {
    pub code: u8,
    message: String,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Exit {}

/// The command line, the environment or the config file is wrong.
pub fn usage(message: impl Into<String>) -> anyhow::Error {
    Exit {
        code: USAGE,
        message: message.into(),
    }
    .into()
}

/// It was understood, but could not be done.
pub fn failure(message: impl Into<String>) -> anyhow::Error {
    Exit {
        code: FAILED,
        message: message.into(),
    }
    .into()
}

/// No coordinator answered.
pub fn unreachable(message: impl Into<String>) -> anyhow::Error {
    Exit {
        code: UNREACHABLE,
        message: message.into(),
    }
    .into()
}

/// The code for any error of the binary.
pub fn code_of(error: &anyhow::Error) -> u8 {
    error.downcast_ref::<Exit>().map_or(FAILED, |exit| exit.code)
}
