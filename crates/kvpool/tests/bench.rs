//! `kvpool bench` as a user runs it, against its own raw servers (child processes of the bench).

use std::process::Command;

#[test]
fn the_bench_measures_its_own_peers_and_ends() {
    let out = Command::new(env!("CARGO_BIN_EXE_kvpool"))
        .args([
            "bench",
            "raw",
            "sum=raw-sum",
            "--rounds",
            "2",
            "--size",
            "64Ki,1Mi",
            "--conns",
            "1,2",
        ])
        .args(["--op", "put,get,exists,mixed", "--bytes", "2Mi", "--json", "-"])
        .args([
            "--bar",
            "put throughput sum/raw >= 0.0001",
            "--bar",
            "get total_cpu sum/raw <= 0.0001",
        ])
        .output()
        .expect("the binary runs");
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{errors}");
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).expect("JSON on standard output");
    let cells = json["cells"].as_array().expect("cells");
    assert_eq!(cells.len(), 4 * 2 * 2);
    for cell in cells {
        let servers = cell["servers"].as_array().expect("servers");
        assert_eq!(servers.len(), 2);
        for server in servers {
            assert_eq!(server["rounds"].as_array().map(Vec::len), Some(2));
            assert!(
                server["rounds"][0]["ops"].as_u64() > Some(0) && server["rounds"][0]["misses"] == 0,
                "{server}"
            );
            assert!(
                server["rounds"][0]["server_cpu_ns"].is_u64(),
                "the raw server's pid is known"
            );
        }
    }
    assert_eq!(
        (&json["bars"][0]["result"], &json["bars"][1]["result"]),
        (&"PASS".into(), &"MISSED".into())
    );
}

#[test]
fn a_server_that_is_not_there_is_a_clear_failure() {
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|l| l.local_addr())
        .expect("loopback")
        .port();
    let url = format!("redis://127.0.0.1:{port}");
    let out = Command::new(env!("CARGO_BIN_EXE_kvpool"))
        .args(["bench", &url])
        .output()
        .expect("the binary runs");
    assert!(!out.status.success());
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(errors.contains("failed to connect"), "{errors}");
}
