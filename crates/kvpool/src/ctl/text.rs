//! Small words for people: ages and counted things.

/// How long ago, in its two largest units at most: `12s`, `3m20s`, `2d4h`, as kubectl shows ages. Empty when unknown.
pub fn age(since_ms: u64, now_ms: u64) -> String {
    if since_ms == 0 {
        return String::new();
    }
    let s = now_ms.saturating_sub(since_ms) / 1000;
    let (m, h, d) = (s / 60, s / 3600, s / 86_400);
    match s {
        0..120 => format!("{s}s"),
        120..600 => format!("{m}m{}s", s % 60),
        600..7200 => format!("{m}m"),
        7200..172_800 => format!("{h}h"),
        _ => format!("{d}d"),
    }
}

/// `1 shard`, `3 shards`.
pub fn count(n: usize, thing: &str) -> String {
    if n == 1 {
        format!("1 {thing}")
    } else {
        format!("{n} {thing}s")
    }
}

/// Milliseconds since the Unix epoch.
pub fn now_ms() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_read_like_kubectl() {
        let ages = [
            (5, "5s"),
            (119, "119s"),
            (200, "3m20s"),
            (3_600, "60m"),
            (7_300, "2h"),
            (200_000, "2d"),
        ];
        for (seconds, shown) in ages {
            assert_eq!(age(1000, 1000 + seconds * 1000), shown);
        }
        assert_eq!(age(0, 5_000), "");
        assert_eq!(age(9_000, 5_000), "0s");
        assert_eq!(
            (count(1, "shard"), count(0, "shard")),
            ("1 shard".into(), "0 shards".into())
        );
    }
}
