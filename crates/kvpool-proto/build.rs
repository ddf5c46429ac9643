//! Compiles `proto/` without protoc. Messages of `records.proto` are mapped to the hand-tagged types of kvpool-state; a
//! second, unmapped generation of that file exists for the test that compares the two.

use std::error::Error;
use std::path::PathBuf;

/// Messages and enums of `records.proto` by the module of kvpool-state that defines them.
const MAPPED: [(&str, &[&str]); 2] = [
    (
        "records",
        &[
            "ClusterRecord",
            "MemberRole",
            "MemberRecord",
            "NodeRecord",
            "ShardState",
            "ShardRecord",
            "ShardAddresses",
            "PoolRecord",
            "SlotCopy",
            "SlotRange",
            "MapShard",
            "SlotMap",
            "Decision",
            "RequestId",
            "Event",
        ],
    ),
    ("command", &["Refusal", "Response"]),
];

const FILES: [&str; 4] = ["records", "cluster", "nodes", "members"];

fn main() -> Result<(), Box<dyn Error>> {
    let proto = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?).join("../../proto");
    let files = FILES.map(|f| proto.join(format!("kvpool/v1/{f}.proto")));
    println!("cargo::rerun-if-changed=build.rs");
    for file in &files {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    let mut mapped = tonic_prost_build::configure()
        .bytes(".kvpool.v1.RaftMessage.payload")
        .emit_rerun_if_changed(false);
    for (module, names) in MAPPED {
        for name in names {
            let rust = format!("::kvpool_state::{module}::{name}");
            mapped = mapped.extern_path(format!(".kvpool.v1.{name}"), rust);
        }
    }
    mapped.compile_fds(protox::compile(&files, [&proto])?)?;

    let unmapped = PathBuf::from(std::env::var("OUT_DIR")?).join("unmapped");
    std::fs::create_dir_all(&unmapped)?;
    tonic_prost_build::configure()
        .build_client(false)
        .build_server(false)
        .btree_map(".")
        .out_dir(&unmapped)
        .emit_rerun_if_changed(false)
        .compile_fds(protox::compile(&files[..1], [&proto])?)?;
    Ok(())
}
