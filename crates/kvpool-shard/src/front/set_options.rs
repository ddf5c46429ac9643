//! The options of SET, which follow the value: `[NX | XX] [EX seconds | PX milliseconds]`.

use std::time::Duration;

use kvpool_wire::resp::parse_integer;

use crate::ops::Condition;

/// Parsed options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SetOptions {
    pub(super) ttl: Option<Duration>,
    pub(super) condition: Condition,
}

pub(super) const SYNTAX: &str = "ERR syntax error";
pub(super) const NOT_INTEGER: &str = "ERR value is not an integer or out of range";
const BAD_TTL: &str = "ERR invalid expire time in 'set' command";

impl SetOptions {
    /// Reads the arguments after the value. The error is the text Redis answers.
    pub(super) fn parse<'a>(mut args: impl Iterator<Item = &'a [u8]>) -> Result<Self, &'static str> {
        let mut options = SetOptions {
            ttl: None,
            condition: Condition::Always,
        };
        while let Some(arg) = args.next() {
            let condition = if arg.eq_ignore_ascii_case(b"NX") {
                Some(Condition::IfAbsent)
            } else if arg.eq_ignore_ascii_case(b"XX") {
                Some(Condition::IfPresent)
            } else {
                None
            };
            if let Some(condition) = condition {
                if options.condition != Condition::Always && options.condition != condition {
                    return Err(SYNTAX);
                }
                options.condition = condition;
                continue;
            }
            let unit_ms = if arg.eq_ignore_ascii_case(b"EX") {
                1000
            } else if arg.eq_ignore_ascii_case(b"PX") {
                1
            } else {
                return Err(SYNTAX);
            };
            let value = args.next().ok_or(SYNTAX)?;
            if options.ttl.is_some() {
                return Err(SYNTAX);
            }
            let count = parse_integer(value).ok_or(NOT_INTEGER)?;
            options.ttl = Some(ttl_from(count, unit_ms).ok_or(BAD_TTL)?);
        }
        Ok(options)
    }
}

/// A positive time to live; `None` when it is not positive or does not fit (Redis keeps milliseconds in an i64).
pub(super) fn ttl_from(count: i64, unit_ms: i64) -> Option<Duration> {
    let ms = count.checked_mul(unit_ms).filter(|&ms| ms > 0)?;
    // Half of what i64 holds leaves room to add "now", as Redis requires too.
    (ms < i64::MAX / 2).then(|| Duration::from_millis(ms.unsigned_abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<SetOptions, &'static str> {
        SetOptions::parse(text.split_ascii_whitespace().map(str::as_bytes))
    }

    #[test]
    fn options_in_any_order_and_case() {
        let expected = SetOptions {
            ttl: Some(Duration::from_secs(10)),
            condition: Condition::IfAbsent,
        };
        assert_eq!(parse("EX 10 NX"), Ok(expected));
        assert_eq!(parse("nx px 10000"), Ok(expected));
        assert_eq!(parse("XX").map(|options| options.condition), Ok(Condition::IfPresent));
        assert_eq!(parse("").map(|options| options.ttl), Ok(None));
    }

    #[test]
    fn what_redis_refuses_is_refused_in_its_words() {
        for text in ["NX XX", "EX", "EX 1 PX 1", "KEEP", "KEEPTTL", "GET", "1"] {
            assert_eq!(parse(text), Err(SYNTAX), "{text}");
        }
        assert_eq!(parse("EX ten"), Err(NOT_INTEGER));
        for text in ["EX 0", "PX -1", "EX 9223372036854775807", "PX 9223372036854775807"] {
            assert_eq!(parse(text), Err(BAD_TTL), "{text}");
        }
    }
}
