//! The console of `kvpool dev` shows what the children's logs say that a person must know: warnings, errors and panics.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Bytes read from one log at a time.
const CHUNK: u64 = 64 << 10;
/// Lines shown of one log at a time; the rest is counted.
const LINES: usize = 8;

/// All logs, each from where it was when the console began.
pub struct Tails(Vec<Tail>);

struct Tail {
    name: String,
    path: PathBuf,
    read: u64,
    /// The line that has no end yet.
    partial: Vec<u8>,
}

impl Tails {
    /// Begins at the present ends of these logs.
    pub fn new(logs: impl Iterator<Item = (String, PathBuf)>) -> Self {
        let begin = |(name, path): (String, PathBuf)| {
            let read = std::fs::metadata(&path).map_or(0, |m| m.len());
            Tail {
                name,
                path,
                read,
                partial: Vec::new(),
            }
        };
        Tails(logs.map(begin).collect())
    }

    /// Hands out what is new and worth showing.
    pub fn show(&mut self, mut print: impl FnMut(String)) {
        for tail in &mut self.0 {
            let told: Vec<String> = tail.lines().iter().filter_map(|line| worth_telling(line)).collect();
            for line in told.iter().take(LINES) {
                print(format!("{}: {line}", tail.name));
            }
            if told.len() > LINES {
                print(format!(
                    "{}: ... and {} more in {}",
                    tail.name,
                    told.len() - LINES,
                    tail.path.display()
                ));
            }
        }
    }
}

impl Tail {
    /// Complete lines that were written since the last call.
    fn lines(&mut self) -> Vec<String> {
        let mut fresh = Vec::new();
        let end = File::open(&self.path).and_then(|mut file| {
            file.seek(SeekFrom::Start(self.read))?;
            file.take(CHUNK).read_to_end(&mut fresh)
        });
        self.read += end.unwrap_or(0) as u64;
        self.partial.extend_from_slice(&fresh);
        let Some(last) = self.partial.iter().rposition(|b| *b == b'\n') else {
            if self.partial.len() as u64 > CHUNK {
                self.partial.clear();
            }
            return Vec::new();
        };
        let rest = self.partial.split_off(last + 1);
        let whole = std::mem::replace(&mut self.partial, rest);
        String::from_utf8_lossy(&whole).lines().map(str::to_owned).collect()
    }
}

/// A JSON log line of level WARN or ERROR as words; a line that is no JSON (a panic) as it is.
fn worth_telling(line: &str) -> Option<String> {
    let Ok(Value::Object(fields)) = serde_json::from_str::<Value>(line) else {
        return (!line.trim().is_empty()).then(|| line.to_owned());
    };
    let level = fields.get("level").and_then(Value::as_str).unwrap_or_default();
    if !matches!(level, "WARN" | "ERROR") {
        return None;
    }
    let message = fields.get("message").and_then(Value::as_str).unwrap_or_default();
    let mut words = format!("{level} {message}");
    for (name, value) in &fields {
        if !matches!(name.as_str(), "level" | "message" | "timestamp" | "target" | "span") {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            words += &format!(" {name}={value}");
        }
    }
    Some(words)
}

/// The last lines of a log as they are, for an error message.
pub fn last_lines(path: &Path, count: usize) -> String {
    let mut text = Vec::new();
    let read = File::open(path).and_then(|mut file| {
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(CHUNK)))?;
        file.take(CHUNK).read_to_end(&mut text)
    });
    if read.is_err() || text.is_empty() {
        return "  (no output)".to_owned();
    }
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(count);
    lines[from..]
        .iter()
        .map(|line| format!("  {line}"))
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn warnings_and_panics_are_told_once_and_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard-1.log");
        std::fs::write(&path, "old\n").unwrap();
        let mut tails = Tails::new([("shard-1".to_owned(), path.clone())].into_iter());
        let mut log = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        write!(
            log,
            "{{\"level\":\"INFO\",\"message\":\"started\"}}\n{{\"level\":\"WARN\",\"mess"
        )
        .unwrap();
        let mut told = Vec::new();
        tails.show(|line| told.push(line));
        assert!(told.is_empty(), "{told:?}");
        write!(log, "age\":\"slow\",\"peer\":\"shard-2\"}}\nthread 'x' panicked at y\n").unwrap();
        tails.show(|line| told.push(line));
        assert_eq!(
            told,
            ["shard-1: WARN slow peer=shard-2", "shard-1: thread 'x' panicked at y"]
        );
        for n in 0..20 {
            writeln!(log, "{{\"level\":\"ERROR\",\"message\":\"{n}\"}}").unwrap();
        }
        told.clear();
        tails.show(|line| told.push(line));
        assert_eq!(told.len(), LINES + 1);
        assert!(told[LINES].contains("12 more"), "{told:?}");
        assert_eq!(last_lines(&path, 1), "  {\"level\":\"ERROR\",\"message\":\"19\"}");
    }
}
