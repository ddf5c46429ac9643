//! The vote file: two copies of the newest vote, each written and synced before the other is touched.
//!
//! Invariant: once `save` returned, both copies hold that vote, so that any one damaged copy loses nothing; a
//! crash in between leaves the old vote or the new one, never none.

use std::io;

use openraft::vote::RaftLeaderId;

use crate::disk::{Disk, DiskFile, read_exact_at};
use crate::error::{Damage, LogError};
use crate::types::{LeaderId, Vote};

pub(crate) const VOTE_FILE: &str = "vote";
const VOTE_TMP: &str = "vote.tmp";
const MAGIC: &[u8; 8] = b"KVRVOTE\x01";
/// The last byte of the magic; the checksum of a copy keeps its place in every format.
const FORMAT: u8 = MAGIC[7];
const COPY_BYTES: usize = 64;
/// The copies lie in different pages, so that no torn write reaches both.
const COPY_AT: [u64; 2] = [0, 4096];
const FILE_BYTES: u64 = 8192;

/// The open vote file.
pub(crate) struct VoteFile<F> {
    file: F,
    seq: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct VoteCopy {
    seq: u64,
    vote: Option<Vote>,
}

impl VoteCopy {
    fn encode(self) -> [u8; COPY_BYTES] {
        let mut out = [0; COPY_BYTES];
        out[..8].copy_from_slice(MAGIC);
        out[8..16].copy_from_slice(&self.seq.to_le_bytes());
        if let Some(vote) = self.vote {
            out[16] = 1;
            out[17] = u8::from(vote.committed);
            out[24..32].copy_from_slice(&vote.leader_id.term.to_le_bytes());
            out[32..40].copy_from_slice(&vote.leader_id.voted_for.to_le_bytes());
        }
        let crc = crc32c::crc32c(&out[..COPY_BYTES - 4]);
        out[COPY_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    fn decode(from: &[u8; COPY_BYTES]) -> Option<VoteCopy> {
        let u64_at = |at: usize| from[at..at + 8].try_into().ok().map(u64::from_le_bytes);
        if &from[..8] != MAGIC || !is_whole(from) {
            return None;
        }
        let vote = match from[16] {
            0 => None,
            _ => Some(Vote {
                leader_id: LeaderId::new(u64_at(24)?, u64_at(32)?),
                committed: from[17] != 0,
            }),
        };
        Some(VoteCopy { seq: u64_at(8)?, vote })
    }
}

impl<F: DiskFile> VoteFile<F> {
    /// Creates the file with no vote in it.
    pub(crate) fn create<D: Disk<File = F>>(disk: &D) -> Result<(), LogError> {
        let file = disk.create(VOTE_TMP).map_err(LogError::io("create the vote file"))?;
        file.preallocate(FILE_BYTES)
            .map_err(LogError::io("allocate the vote file"))?;
        let empty = VoteCopy { seq: 0, vote: None }.encode();
        for at in COPY_AT {
            file.write_at(&empty, at).map_err(LogError::io("write the vote file"))?;
        }
        file.sync().map_err(LogError::io("sync the vote file"))?;
        disk.rename(VOTE_TMP, VOTE_FILE)
            .map_err(LogError::io("rename the vote file"))?;
        disk.sync_dir().map_err(LogError::io("sync the data directory"))
    }

    /// Reads the vote and changes nothing; also tells whether each copy holds it.
    pub(crate) fn read<D: Disk<File = F>>(disk: &D) -> Result<(Option<Vote>, [bool; 2]), LogError> {
        let (copies, newest) = read_copies(&open_file(disk)?)?;
        Ok((newest.vote, copies.map(|copy| copy == Some(newest))))
    }

    /// Opens the file, mends a copy that a crash left half written, and returns the vote.
    pub(crate) fn open<D: Disk<File = F>>(disk: &D) -> Result<(Self, Option<Vote>), LogError> {
        let file = open_file(disk)?;
        let (copies, newest) = read_copies(&file)?;
        for (copy, at) in copies.iter().zip(COPY_AT) {
            if *copy != Some(newest) {
                file.write_at(&newest.encode(), at)
                    .map_err(LogError::io("mend the vote file"))?;
                file.sync().map_err(LogError::io("sync the vote file"))?;
            }
        }
        Ok((VoteFile { file, seq: newest.seq }, newest.vote))
    }

    /// Makes `vote` durable in both copies.
    pub(crate) fn save(&mut self, vote: Vote) -> Result<(), LogError> {
        self.seq += 1;
        let bytes = VoteCopy {
            seq: self.seq,
            vote: Some(vote),
        }
        .encode();

        for at in COPY_AT {
            self.file.write_at(&bytes, at).map_err(LogError::io("write the vote"))?;
            self.file.sync().map_err(LogError::io("sync the vote"))?;
        }
        Ok(())
    }
}

fn open_file<D: Disk>(disk: &D) -> Result<D::File, LogError> {
    disk.open(VOTE_FILE).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => Damage::Missing(VOTE_FILE.to_string()).into(),
        _ => LogError::io("open the vote file")(e),
    })
}

fn is_whole(copy: &[u8; COPY_BYTES]) -> bool {
    copy[COPY_BYTES - 4..] == crc32c::crc32c(&copy[..COPY_BYTES - 4]).to_le_bytes()
}

type Copies = [Option<VoteCopy>; 2];

/// Both copies as far as they can be read, and the newer of them.
fn read_copies<F: DiskFile>(file: &F) -> Result<(Copies, VoteCopy), LogError> {
    let mut copies = [None; 2];
    for (copy, at) in copies.iter_mut().zip(COPY_AT) {
        let mut bytes = [0; COPY_BYTES];
        match read_exact_at(file, &mut bytes, at) {
            Ok(()) if is_whole(&bytes) && bytes[..7] == MAGIC[..7] && bytes[7] > FORMAT => {
                return Err(Damage::TooNew {
                    file: VOTE_FILE.to_string(),
                    found: bytes[7].into(),
                    known: FORMAT.into(),
                }
                .into());
            }
            Ok(()) => *copy = VoteCopy::decode(&bytes),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {}
            Err(e) => return Err(LogError::io("read the vote file")(e)),
        }
    }
    match copies.iter().flatten().max_by_key(|copy| copy.seq) {
        Some(newest) => Ok((copies, *newest)),
        None => Err(Damage::Corrupt {
            file: VOTE_FILE.to_string(),
            offset: 0,
            what: "neither copy of the vote can be read".to_string(),
        }
        .into()),
    }
}
