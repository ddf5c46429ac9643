//! The request parser: a push machine that consumes its input as it comes.
//!
//! [`RequestParser::step`] takes what it can use off the front of the input and says what to do next. It keeps the
//! arguments of the command in hand (at most [`MAX_COMMAND_BYTES`]), never more of the input, so a connection needs only
//! one small read buffer. Two kinds of bulk strings are not kept but left to the shell, which must take exactly that many
//! bytes off the stream and then call `step` again:
//! - the value of `SET key value …` ([`Step::Value`]): streamed into the store;
//! - any argument too long to be a key or an option ([`Step::Skip`]): thrown away, so that an odd command costs neither
//!   memory nor the connection.

use super::{MAX_ARGS, MAX_COMMAND_BYTES};
use crate::foreign::Foreign;
use crate::{MAX_KEY_BYTES, MAX_VALUE_BYTES};
use thiserror::Error;

/// Capacity that an idle parser keeps for arguments, in bytes.
const KEPT_CAPACITY: usize = 4096;
/// The longest `*n` or `$n` line (a sign and 19 digits would fit), and the longest inline command.
const MAX_LINE: usize = 64;

/// The request stream cannot be followed any further: answer with `-ERR` and this text, then close.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ProtocolError {
    /// The number of arguments is no number, or above [`MAX_ARGS`].
    #[error("Protocol error: invalid multibulk length")]
    ArgCount,
    /// A bulk length is no number, negative, or above [`MAX_VALUE_BYTES`].
    #[error("Protocol error: invalid bulk length")]
    BulkLength,
    /// Something else than a bulk string inside a request.
    #[error("Protocol error: expected '$'")]
    ExpectedBulk,
    /// A bulk string is not followed by CR LF.
    #[error("Protocol error: expected CRLF after a bulk string")]
    ExpectedCrlf,
    /// Not an array, and not one of the two inline commands that are served.
    #[error("Protocol error: expected '*'")]
    NotRequest(Foreign),
}

impl ProtocolError {
    /// The word used in metric labels.
    pub fn label(self) -> &'static str {
        match self {
            ProtocolError::ArgCount => "arg_count",
            ProtocolError::BulkLength => "bulk_length",
            ProtocolError::ExpectedBulk | ProtocolError::ExpectedCrlf => "framing",
            ProtocolError::NotRequest(foreign) => foreign.label(),
        }
    }
}

/// What the shell does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// All input is consumed; read more.
    More,
    /// `len` bytes of a SET value follow. The key is [`Args::get`]`(1)`; options, if [`RequestParser::arg_count`] says
    /// more than 3, come after the value.
    Value { len: u64 },
    /// `len` bytes follow that belong to nobody.
    Skip { len: u64 },
    /// The command is complete: see [`RequestParser::args`], which stays valid until the next call of `step`.
    Command,
}

/// The arguments of a command. A streamed or skipped one is present and empty.
#[derive(Debug, Default)]
pub struct Args {
    bytes: Vec<u8>,
    /// End of each argument in `bytes`.
    ends: Vec<u32>,
    /// Number of the first argument that was skipped for its length.
    skipped: Option<usize>,
}

impl Args {
    /// Number of arguments read so far, the command's name included.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether nothing was read yet.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The argument with this index; empty when there is none.
    pub fn get(&self, index: usize) -> &[u8] {
        let Some(&end) = self.ends.get(index) else {
            return b"";
        };
        let start = match index {
            0 => 0,
            _ => self.ends.get(index - 1).map_or(0, |&start| start as usize),
        };
        self.bytes.get(start..end as usize).unwrap_or(b"")
    }

    /// Bytes held for the arguments, at most [`MAX_COMMAND_BYTES`].
    pub fn kept_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// All arguments from `first` on.
    pub fn iter_from(&self, first: usize) -> impl Iterator<Item = &[u8]> {
        (first..self.len()).map(|index| self.get(index))
    }

    /// Whether any argument (the value of SET aside) was too long and is missing.
    pub fn was_skipped(&self) -> bool {
        self.skipped.is_some()
    }

    fn clear(&mut self) {
        // One large command must not pin its memory for the life of an idle connection.
        self.bytes.clear();
        self.bytes.shrink_to(KEPT_CAPACITY);
        self.ends.clear();
        self.ends.shrink_to(MAX_LINE);
        self.skipped = None;
    }

    fn close_arg(&mut self) {
        // `bytes` never exceeds MAX_COMMAND_BYTES, far below u32::MAX.
        self.ends.push(self.bytes.len() as u32);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the first byte of a command.
    Start,
    /// Inside a `*n` line.
    Count,
    /// Before or inside a `$n` line.
    Header,
    /// Inside a kept argument, with this many bytes missing.
    Arg { missing: usize },
    /// Before CR LF, `seen` of which are consumed.
    Crlf { seen: u8 },
    /// Inside an inline command.
    Inline,
    /// A command was returned; the next step starts another.
    Done,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct RequestParser {
    state: State,
    args: Args,
    expected: usize,
    line: [u8; MAX_LINE],
    line_len: usize,
}

impl Default for RequestParser {
    fn default() -> Self {
        Self::new()
    }
}

impl RequestParser {
    /// A parser at the start of a stream.
    pub fn new() -> Self {
        RequestParser {
            state: State::Start,
            args: Args::default(),
            expected: 0,
            line: [0; MAX_LINE],
            line_len: 0,
        }
    }

    /// The arguments read so far of the command in hand.
    pub fn args(&self) -> &Args {
        &self.args
    }

    /// How many arguments the command in hand announced, its name included.
    pub fn arg_count(&self) -> usize {
        self.expected
    }

    /// Whether a command has begun and is not complete.
    pub fn in_command(&self) -> bool {
        !matches!(self.state, State::Start | State::Done)
    }

    /// Consumes input up to the next thing the shell must do. With [`Step::More`], all of it.
    ///
    /// # Errors
    /// [`ProtocolError`]; the parser must not be used afterwards.
    pub fn step(&mut self, input: &mut &[u8]) -> Result<Step, ProtocolError> {
        if self.state == State::Done {
            self.args.clear();
            self.expected = 0;
            self.state = State::Start;
        }
        while !input.is_empty() {
            if let Some(step) = self.advance(input)? {
                return Ok(step);
            }
        }
        Ok(Step::More)
    }

    fn advance(&mut self, input: &mut &[u8]) -> Result<Option<Step>, ProtocolError> {
        match self.state {
            State::Start => {
                self.line_len = 0;
                self.state = if input[0] == b'*' { State::Count } else { State::Inline };
                Ok(None)
            }
            State::Count => {
                if self.take_line(input, ProtocolError::ArgCount)? {
                    self.begin_command()?;
                }
                Ok(None)
            }
            State::Header => self.header(input),
            State::Arg { missing } => {
                let (now, rest) = input.split_at(missing.min(input.len()));
                self.args.bytes.extend_from_slice(now);
                *input = rest;
                self.state = State::Arg {
                    missing: missing - now.len(),
                };
                if now.len() == missing {
                    self.args.close_arg();
                    self.state = State::Crlf { seen: 0 };
                }
                Ok(None)
            }
            State::Crlf { seen } => self.crlf(seen, input),
            State::Inline => self.inline(input),
            State::Done => Ok(None),
        }
    }

    fn begin_command(&mut self) -> Result<(), ProtocolError> {
        let count = self.number().ok_or(ProtocolError::ArgCount)?;
        self.line_len = 0;
        if count > MAX_ARGS as i64 {
            return Err(ProtocolError::ArgCount);
        }
        // As Redis does, an empty or null array is no command at all.
        self.expected = usize::try_from(count).unwrap_or(0);
        self.state = if self.expected == 0 {
            State::Start
        } else {
            State::Header
        };
        Ok(())
    }

    fn header(&mut self, input: &mut &[u8]) -> Result<Option<Step>, ProtocolError> {
        if self.line_len == 0 && input[0] != b'$' {
            return Err(ProtocolError::ExpectedBulk);
        }
        if !self.take_line(input, ProtocolError::BulkLength)? {
            return Ok(None);
        }
        let len = self
            .number()
            .and_then(|len| u64::try_from(len).ok())
            .filter(|&len| len <= MAX_VALUE_BYTES)
            .ok_or(ProtocolError::BulkLength)?;
        self.line_len = 0;
        let index = self.args.len();
        let is_value = index == 2 && self.args.get(0).eq_ignore_ascii_case(b"SET") && !self.args.was_skipped();
        let room = MAX_COMMAND_BYTES - self.args.bytes.len();
        if !is_value && len <= MAX_KEY_BYTES.min(room) as u64 {
            self.state = State::Arg { missing: len as usize };
            if len == 0 {
                self.args.close_arg();
                self.state = State::Crlf { seen: 0 };
            }
            return Ok(None);
        }
        self.args.close_arg();
        self.state = State::Crlf { seen: 0 };
        if is_value {
            return Ok(Some(Step::Value { len }));
        }
        self.args.skipped.get_or_insert(index);
        Ok(Some(Step::Skip { len }))
    }

    fn crlf(&mut self, seen: u8, input: &mut &[u8]) -> Result<Option<Step>, ProtocolError> {
        let expected = if seen == 0 { b'\r' } else { b'\n' };
        if input[0] != expected {
            return Err(ProtocolError::ExpectedCrlf);
        }
        *input = &input[1..];
        if seen == 0 {
            self.state = State::Crlf { seen: 1 };
            return Ok(None);
        }
        if self.args.len() < self.expected {
            self.state = State::Header;
            return Ok(None);
        }
        self.state = State::Done;
        Ok(Some(Step::Command))
    }

    /// `PING` and `QUIT` typed at a terminal or sent by a probe; anything else is another protocol.
    fn inline(&mut self, input: &mut &[u8]) -> Result<Option<Step>, ProtocolError> {
        let first = if self.line_len == 0 { input[0] } else { self.line[0] };
        // Binary protocols have no line ends to wait for; four bytes tell them apart.
        let text = first.is_ascii_alphabetic() || matches!(first, b'\r' | b'\n' | b' ');
        let limit = if text { MAX_LINE } else { 4 };
        let room = limit - self.line_len;
        let (now, ended) = match input.iter().take(room).position(|&byte| byte == b'\n') {
            Some(at) => (at + 1, true),
            None => (room.min(input.len()), false),
        };
        self.line[self.line_len..self.line_len + now].copy_from_slice(&input[..now]);
        self.line_len += now;
        *input = &input[now..];
        let line = &self.line[..self.line_len];
        let foreign = ProtocolError::NotRequest(Foreign::of(line));
        if !ended {
            return if self.line_len == limit { Err(foreign) } else { Ok(None) };
        }
        let word = line.trim_ascii();
        if word.is_empty() {
            self.state = State::Start;
            return Ok(None);
        }
        if !word.eq_ignore_ascii_case(b"PING") && !word.eq_ignore_ascii_case(b"QUIT") {
            return Err(foreign);
        }
        self.args.bytes.extend_from_slice(word);
        self.args.close_arg();
        self.expected = 1;
        self.state = State::Done;
        Ok(Some(Step::Command))
    }

    /// Collects a line that ends in CR LF. `Ok(true)` when it is complete (without its end, in `line[..line_len]`).
    fn take_line(&mut self, input: &mut &[u8], error: ProtocolError) -> Result<bool, ProtocolError> {
        while let Some((&byte, rest)) = input.split_first() {
            *input = rest;
            let after_cr = self.line_len > 0 && self.line[self.line_len - 1] == b'\r';
            if after_cr {
                self.line_len -= 1;
                return if byte == b'\n' { Ok(true) } else { Err(error) };
            }
            if self.line_len == MAX_LINE {
                return Err(error);
            }
            self.line[self.line_len] = byte;
            self.line_len += 1;
        }
        Ok(false)
    }

    /// The number after the marker of a complete line.
    fn number(&self) -> Option<i64> {
        let digits = self.line.get(1..self.line_len)?;
        parse_integer(digits)
    }
}

/// A decimal integer as Redis reads one: an optional minus, then digits only.
pub fn parse_integer(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text.split_first() {
        Some((b'-', rest)) => (true, rest),
        _ => (false, text),
    };
    if digits.is_empty() {
        return None;
    }
    let mut value: i64 = 0;
    for &byte in digits {
        if !byte.is_ascii_digit() {
            return None;
        }
        let digit = i64::from(byte - b'0');
        value = value.checked_mul(10)?;
        value = if negative {
            value.checked_sub(digit)?
        } else {
            value.checked_add(digit)?
        };
    }
    Some(value)
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
