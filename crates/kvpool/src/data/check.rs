//! `kvpool coordinator check`: what a data directory holds, and what is wrong with it.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use kvpool_coordinator::offline::{self, Checked, Inspection, LogSeen, Position};

use crate::ctl::text::count;
use crate::exit::{FAILED, failure};
use crate::out;

const EXAMPLES: &str = "\
Examples:
  kvpool coordinator check /var/lib/kvpool/1
  kvpool coordinator check /mnt/copy-of-1 && echo sound

Reads every file of a coordinator that is stopped and builds the state from them, as a start would. Writes nothing.
Exit codes: 0 a coordinator can start from it, 1 it can not (the output says why), 2 wrong usage.";

/// Check the data directory of a stopped coordinator.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct CheckArgs {
    /// The data directory
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Runs the command.
pub fn run(args: &CheckArgs) -> Result<ExitCode> {
    let checked = offline::check(&args.dir).map_err(|e| failure(e.to_string()))?;
    out::show(&render(&checked));
    Ok(if checked.files.faults.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(FAILED)
    })
}

/// The whole output.
fn render(checked: &Checked) -> String {
    let files = &checked.files;
    let mut out = match files.faults.len() {
        0 => "sound\n".to_owned(),
        n => format!("damaged: {}\n", count(n, "fault")),
    };
    for fault in &files.faults {
        out += &format!("  {fault}\n");
    }
    for remark in remarks(files) {
        out += &format!("  note: {remark}\n");
    }
    let whose = files.marker.as_ref().map_or_else(
        || "unknown".to_owned(),
        |m| format!("member {} of cluster {}", m.member_id, m.cluster_id),
    );
    out += &format!("directory     {whose}, {} bytes\n", files.bytes);
    let vote = match files.vote.map(|v| v.vote) {
        None => "unknown".to_owned(),
        Some(None) => "none yet".to_owned(),
        Some(Some((term, member))) => format!("term {term}, for member {member}"),
    };
    out += &format!("vote          {vote}\n");
    out += &format!(
        "log           {}\n",
        files.log.as_ref().map_or("unknown".to_owned(), log)
    );
    let snapshot = files.snapshot.as_ref().map_or("none".to_owned(), |s| {
        format!("{}, {} bytes, to {}", s.file, s.bytes, position(s.last))
    });
    out += &format!("snapshot      {snapshot}\n");
    let members: Vec<String> = files.members.iter().map(|(id, a)| format!("{id}={a}")).collect();
    out += &format!(
        "members       {}\n",
        if members.is_empty() {
            "none yet".to_owned()
        } else {
            members.join(", ")
        }
    );
    out + &format!("state         {}\n", state(checked))
}

fn position(at: Option<Position>) -> String {
    at.map_or("nothing".to_owned(), |at| {
        format!("entry {} of term {}", at.index, at.term)
    })
}

fn log(log: &LogSeen) -> String {
    format!(
        "{}, to {}; known to be committed: to {}; removed: to {}",
        count(log.segments, "segment"),
        position(log.last),
        position(log.committed),
        position(log.purged)
    )
}

fn state(checked: &Checked) -> String {
    if checked.cluster_generation == 0 {
        return "no cluster was created yet".to_owned();
    }
    let pools: Vec<String> = checked.pools.iter().map(|(p, e)| format!("{p} (epoch {e})")).collect();
    format!(
        "generation {}, revision {}, {}, {}, pools {}",
        checked.cluster_generation,
        checked.revision,
        count(checked.nodes, "node"),
        count(checked.shards, "shard"),
        pools.join(", ")
    )
}

/// What a start puts right by itself.
fn remarks(files: &Inspection) -> Vec<String> {
    let mut remarks = Vec::new();
    if let Some(log) = files.log.as_ref().filter(|log| log.torn_bytes > 0) {
        remarks.push(format!(
            "the last batch of the log, {} bytes, was cut short by a crash and never acknowledged; a start cuts it off",
            log.torn_bytes
        ));
    }
    if files.vote.is_some_and(|vote| vote.copies < 2) {
        remarks.push("one of the two copies of the vote is damaged; a start mends it".to_owned());
    }
    if !files.leftovers.is_empty() {
        remarks.push(format!(
            "half-made files, which a start removes: {}",
            files.leftovers.join(", ")
        ));
    }
    remarks
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_coordinator::offline::LogError;

    fn checked() -> Checked {
        Checked {
            files: Inspection {
                log: Some(LogSeen {
                    segments: 1,
                    last: Some(Position { term: 3, index: 41 }),
                    committed: Some(Position { term: 3, index: 40 }),
                    purged: None,
                    torn_bytes: 0,
                }),
                ..Inspection::default()
            },
            cluster_generation: 2,
            revision: 40,
            nodes: 1,
            shards: 3,
            pools: vec![("default".to_owned(), 7)],
        }
    }

    #[test]
    fn sound_is_the_first_word() {
        let text = render(&checked());
        assert!(text.starts_with("sound\n"), "{text}");
        assert!(
            text.contains("1 segment, to entry 41 of term 3; known to be committed: to entry 40 of term 3"),
            "{text}"
        );
        assert!(
            text.contains("generation 2, revision 40, 1 node, 3 shards, pools default (epoch 7)"),
            "{text}"
        );
    }

    #[test]
    fn faults_come_first_and_remarks_after_them() {
        let mut bad = checked();
        bad.files.faults.push(LogError::Io {
            what: "read the marker".to_owned(),
            source: std::io::Error::other("gone"),
        });
        bad.files.leftovers.push("x.tmp".to_owned());
        let text = render(&bad);
        assert!(
            text.starts_with("damaged: 1 fault\n  failed to read the marker: gone\n  note: "),
            "{text}"
        );
    }
}
