//! The marker file: whose data a directory holds, so that a lost or swapped disk is noticed, never joined.
//!
//! Format, one line each, then a checksum over them: `kvpool-raft 1`, `cluster <id>`, `member <id>`,
//! `crc32c <hex>`. The number in the first line is the format. Written once; the text form is for people with a broken disk.

use std::io;

use crate::config::MemberId;
use crate::disk::{Disk, DiskFile, read_exact_at};
use crate::error::{Damage, LogError};

/// The marker's file name.
pub const MARKER_FILE: &str = "marker";
const MARKER_TMP: &str = "marker.tmp";
const MAX_MARKER_BYTES: u64 = 512;
const HEAD: &str = "kvpool-raft ";
const FORMAT: u32 = 1;

/// Whose data a directory holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marker {
    /// The cluster.
    pub cluster_id: String,
    /// The member.
    pub member_id: MemberId,
}

impl Marker {
    /// Reads the marker of a data directory; `None` when there is none yet.
    ///
    /// # Errors
    /// When the file cannot be read or is damaged.
    pub fn read<D: Disk>(disk: &D) -> Result<Option<Marker>, LogError> {
        let file = match disk.open(MARKER_FILE) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(LogError::io("open the marker")(e)),
        };
        let len = file.len().map_err(LogError::io("read the marker"))?;
        if len > MAX_MARKER_BYTES {
            return Err(corrupt("it is too long").into());
        }
        let mut bytes = vec![0; len as usize];
        read_exact_at(&file, &mut bytes, 0).map_err(LogError::io("read the marker"))?;
        parse(&bytes)?.map_or_else(|| Err(corrupt("it is not a marker").into()), |marker| Ok(Some(marker)))
    }

    /// Makes the marker durable. Not called where one exists.
    pub(crate) fn write<D: Disk>(&self, disk: &D) -> Result<(), LogError> {
        let text = self.render();
        let file = disk.create(MARKER_TMP).map_err(LogError::io("create the marker"))?;
        file.write_at(text.as_bytes(), 0)
            .map_err(LogError::io("write the marker"))?;
        file.sync().map_err(LogError::io("sync the marker"))?;
        disk.rename(MARKER_TMP, MARKER_FILE)
            .map_err(LogError::io("rename the marker"))?;
        disk.sync_dir().map_err(LogError::io("sync the data directory"))
    }

    /// Fails unless the marker names this cluster and member.
    pub(crate) fn check(&self, expected: &Marker) -> Result<(), Damage> {
        if self == expected {
            return Ok(());
        }
        Err(Damage::Foreign {
            cluster: expected.cluster_id.clone(),
            member: expected.member_id,
            found_cluster: self.cluster_id.clone(),
            found_member: self.member_id,
        })
    }

    fn render(&self) -> String {
        let body = format!(
            "{HEAD}{FORMAT}\ncluster {}\nmember {}\n",
            self.cluster_id, self.member_id
        );
        let crc = crc32c::crc32c(body.as_bytes());
        format!("{body}crc32c {crc:08x}\n")
    }
}

/// `None` for bytes that are no marker.
fn parse(bytes: &[u8]) -> Result<Option<Marker>, Damage> {
    let Some(body) = checked_body(bytes) else {
        return Ok(None);
    };
    let Some((format, rest)) = body.strip_prefix(HEAD).and_then(|rest| rest.split_once('\n')) else {
        return Ok(None);
    };
    match format.parse::<u32>() {
        Ok(FORMAT) => Ok(fields(rest)),
        Ok(found) if found > FORMAT => Err(Damage::TooNew {
            file: MARKER_FILE.to_string(),
            found,
            known: FORMAT,
        }),
        _ => Ok(None),
    }
}

/// The lines before the checksum, when it is theirs.
fn checked_body(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (body, crc) = text.split_at(text.rfind("crc32c ")?);
    let crc = crc.strip_prefix("crc32c ")?.strip_suffix('\n')?;
    (crc.len() == 8 && u32::from_str_radix(crc, 16).ok()? == crc32c::crc32c(body.as_bytes())).then_some(body)
}

fn fields(lines: &str) -> Option<Marker> {
    let rest = lines.strip_prefix("cluster ")?;
    // The cluster id may hold any character, so the member's line is found from the end.
    let at = rest.rfind("\nmember ")?;
    let member_id = rest[at..].strip_prefix("\nmember ")?.strip_suffix('\n')?.parse().ok()?;
    Some(Marker {
        cluster_id: rest[..at].to_string(),
        member_id,
    })
}

fn corrupt(what: &str) -> Damage {
    Damage::Corrupt {
        file: MARKER_FILE.to_string(),
        offset: 0,
        what: what.to_string(),
    }
}
