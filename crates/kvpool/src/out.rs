//! Standard output. A reader that has gone (`kvpool get slots | head`) is no error of ours, and `println!` would panic on it.

use std::io::Write;

/// Writes the text as it is.
pub fn show(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
