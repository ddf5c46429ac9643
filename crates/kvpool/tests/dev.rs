//! `kvpool dev` for real: ready file, status, get, a value through the proxy, Ctrl-C. Free ports, a temporary directory, and
//! nothing left behind. The tests with LMCache, Redis clients and faults are in `tests/peers`.

#![allow(clippy::unwrap_used)] // helpers of tests count as tests
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const KVPOOL: &str = env!("CARGO_BIN_EXE_kvpool");
/// Far beyond what anything here takes; only a hang meets it.
const PATIENCE: Duration = Duration::from_secs(240);

/// A running `kvpool dev`. Ended when dropped, whatever the test did.
struct Dev {
    process: Child,
    dir: tempfile::TempDir,
    ready: Value,
}

impl Dev {
    fn start(flags: &[&str]) -> Dev {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ready.json");
        let data = dir.path().join("data");
        let mut process = Command::new(KVPOOL)
            .args([
                "dev",
                "--timing",
                "relaxed",
                "--resp-port",
                "0",
                "--lm-port",
                "0",
                "--http-port",
                "0",
            ])
            .args([
                "--ready-file".as_ref(),
                file.as_os_str(),
                "--data-dir".as_ref(),
                data.as_os_str(),
            ])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(std::fs::File::create(dir.path().join("out")).unwrap())
            .stderr(std::fs::File::create(dir.path().join("err")).unwrap())
            .spawn()
            .unwrap();
        let ready = wait_for("the ready file", || {
            if let Some(status) = process.try_wait().unwrap() {
                let err = std::fs::read_to_string(dir.path().join("err")).unwrap();
                panic!("kvpool dev ended: {status}\n{err}");
            }
            std::fs::read(&file)
                .ok()
                .map(|text| serde_json::from_slice(&text).unwrap())
        });
        Dev { process, dir, ready }
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    fn ask(&self, words: &[&str]) -> Output {
        let all = self.ready["coordinators"].as_array().unwrap();
        let endpoints: Vec<&str> = all.iter().map(|c| c["endpoint"].as_str().unwrap()).collect();
        Command::new(KVPOOL)
            .args(words)
            .env("KVPOOL_ENDPOINTS", endpoints.join(","))
            .env("KVPOOL_JOIN_TOKEN_FILE", self.data().join("join-token"))
            .env("KVPOOL_TIMEOUT", "30s")
            .output()
            .unwrap()
    }

    fn get(&self, what: &str) -> Vec<Value> {
        let output = self.ask(&["get", what, "-o", "json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The pids of all children.
    fn children(&self) -> Vec<i32> {
        let of = |list: &str| self.ready[list].as_array().unwrap().clone();
        let all = of("coordinators")
            .into_iter()
            .chain(of("shards"))
            .chain([self.ready["proxy"].clone()]);
        all.map(|child| i32::try_from(child["pid"].as_i64().unwrap()).unwrap())
            .collect()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.process.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    fn interrupt(&mut self) -> ExitStatus {
        self.signal(Signal::INT);
        wait_for("the end of kvpool dev", || self.process.try_wait().unwrap())
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("out")).unwrap()
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        if self.process.try_wait().unwrap().is_none() {
            self.signal(Signal::TERM);
            let _ = self.process.wait();
        }
        if std::thread::panicking() {
            eprintln!("--- output of kvpool dev\n{}", self.said());
        }
    }
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// True while the pid is a process that runs: a zombie that waits to be reaped by init does not.
fn runs(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        stat.rsplit(')')
            .next()
            .is_some_and(|rest| !rest.trim_start().starts_with(['Z', 'X']))
    })
}

fn http(address: &Value, path: &str) -> String {
    let mut stream = TcpStream::connect(address.as_str().unwrap()).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply
}

/// SET and GET of one value by RESP.
fn store_and_fetch(address: &Value) {
    let mut stream = TcpStream::connect(address.as_str().unwrap()).unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut line = String::new();
    let set = b"*3\r\n$3\r\nSET\r\n$8\r\nsome-key\r\n$10\r\nsome-value\r\n";
    stream.write_all(set).unwrap();
    reader.read_line(&mut line).unwrap();
    assert_eq!(line, "+OK\r\n");
    stream.write_all(b"*2\r\n$3\r\nGET\r\n$8\r\nsome-key\r\n").unwrap();
    let mut reply = [0; 17];
    reader.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"$10\r\nsome-value\r\n");
}

#[test]
fn a_whole_pool_starts_serves_and_ends() {
    let mut dev = Dev::start(&["--memory-per-shard", "64MiB"]);
    let status = dev.ask(&["status"]);
    let text = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(
        status.status.success() && text.starts_with("healthy"),
        "{text}{status:?}"
    );

    assert_eq!(dev.get("nodes").len(), 3);
    let shards = dev.get("shards");
    assert!(
        shards.len() == 3 && shards.iter().all(|s| s["state"] == "Up"),
        "{shards:?}"
    );
    let coordinators = dev.get("coordinators");
    assert_eq!(
        coordinators.iter().filter(|c| c["leader"] == true).count(),
        1,
        "{coordinators:?}"
    );
    let slots = dev.get("slots");
    let covered: u64 = slots
        .iter()
        .filter(|s| s["state"] == "in-sync")
        .map(|s| s["count"].as_u64().unwrap())
        .sum();
    assert_eq!(covered, 16384, "{slots:?}");
    let pools = dev.get("pools");
    assert_eq!(
        (&pools[0]["name"], &pools[0]["factor"]),
        (&Value::from("default"), &Value::from(2))
    );

    for child in ["coordinators", "shards"] {
        for entry in dev.ready[child].as_array().unwrap() {
            assert!(http(&entry["http"], "/readyz").starts_with("HTTP/1.1 200"), "{entry}");
            assert!(
                http(&entry["http"], "/metrics").contains("process_resident_memory_bytes"),
                "{entry}"
            );
        }
    }
    store_and_fetch(&dev.ready["proxy"]["resp"]);

    let said = dev.said();
    for words in [
        "redis://",
        "resp://",
        "lm://",
        "--l2-adapter",
        "/metrics",
        "Ctrl-C",
        "KVPOOL_ENDPOINTS",
    ] {
        assert!(said.contains(words), "{words} is not in:\n{said}");
    }
    let token = std::fs::read_to_string(dev.data().join("join-token")).unwrap();
    assert!(!said.contains(token.trim()), "the token was printed");

    let children = dev.children();
    assert_eq!(children.len(), 7);
    assert!(dev.interrupt().success());
    assert!(
        children.iter().all(|pid| !runs(*pid)),
        "children are left: {children:?}"
    );
    assert!(!dev.dir.path().join("ready.json").exists());
}

#[test]
fn a_lost_child_is_told_and_not_restarted_and_children_follow_their_parent() {
    let mut dev = Dev::start(&["--coordinators", "1", "--shards", "2", "--memory-per-shard", "32MiB"]);
    let victim = i32::try_from(dev.ready["shards"][1]["pid"].as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(victim).unwrap(), Signal::KILL).unwrap();
    wait_for("the news of the lost child", || {
        dev.said().contains("shard-2 ended (signal 9)").then_some(())
    });
    let degraded = wait_for("a degraded status", || {
        let output = dev.ask(&["status"]);
        (output.status.code() == Some(1)).then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    });
    assert!(
        degraded.starts_with("degraded") && degraded.contains("shard-2"),
        "{degraded}"
    );
    // The parent has no time to say good-bye.
    let children = dev.children();
    dev.process.kill().unwrap();
    dev.process.wait().unwrap();
    wait_for("the children to follow", || {
        children.iter().all(|pid| !runs(*pid)).then_some(())
    });
}

#[test]
fn nobody_answers_is_exit_code_3() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let output = Command::new(KVPOOL)
        .args([
            "status",
            "--timeout",
            "20s",
            "--endpoints",
            &format!("127.0.0.1:{port}"),
        ])
        .env("KVPOOL_JOIN_TOKEN", "not-the-real-one")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(
        said.contains(&port.to_string()) && said.contains("kvpool dev"),
        "{said}"
    );
}

#[test]
fn a_role_says_what_it_lacks() {
    let run = |words: &[&str], dir: &Path| {
        Command::new(KVPOOL)
            .args(words)
            .current_dir(dir)
            .env_remove("KVPOOL_JOIN_TOKEN")
            .output()
            .unwrap()
    };
    let dir = tempfile::tempdir().unwrap();
    for (words, lacks) in [
        (&["shard", "run"] as &[&str], "--id"),
        (
            &["shard", "run", "--id", "a", "--node", "n", "--memory", "64MiB"],
            "--coordinators",
        ),
        (
            &["proxy", "run", "--coordinators", "127.0.0.1:1", "--http", "127.0.0.1:0"],
            "KVPOOL_JOIN_TOKEN",
        ),
        (&["coordinator", "run", "--id", "1", "--data-dir", "d"], "--members"),
        (&["proxy", "run", "--config", "none.toml"], "none.toml"),
        (
            &["proxy", "run", "--coordinators", "127.0.0.1:1", "--http", "0.0.0.0:0"],
            "--insecure-bind",
        ),
    ] {
        let output = run(words, dir.path());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {said}");
        assert!(said.contains(lacks), "{words:?}: {said}");
    }
}

/// A client that writes and reads like an engine: one connection, every byte checked, never a second try.
struct Reader {
    stream: TcpStream,
    replies: BufReader<TcpStream>,
}

impl Reader {
    fn connect(address: &Value) -> Reader {
        let stream = TcpStream::connect(address.as_str().unwrap()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let replies = BufReader::new(stream.try_clone().unwrap());
        Reader { stream, replies }
    }

    fn value(key: usize) -> Vec<u8> {
        let byte = |i: usize| u8::try_from((i * 31 + key * 7) % 251).unwrap();
        (0..32 << 10).map(byte).collect()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.replies.read_line(&mut line).unwrap();
        line
    }

    fn set(&mut self, key: usize) {
        let (name, value) = (format!("key-{key}"), Reader::value(key));
        let head = format!("*3\r\n$3\r\nSET\r\n${}\r\n{name}\r\n${}\r\n", name.len(), value.len());
        self.stream.write_all(head.as_bytes()).unwrap();
        self.stream.write_all(&value).unwrap();
        self.stream.write_all(b"\r\n").unwrap();
        assert_eq!(self.line(), "+OK\r\n");
    }

    /// True when it hit. Anything but the right bytes or a clean miss fails the test.
    fn get(&mut self, key: usize) -> bool {
        let name = format!("key-{key}");
        let command = format!("*2\r\n$3\r\nGET\r\n${}\r\n{name}\r\n", name.len());
        self.stream.write_all(command.as_bytes()).unwrap();
        let (head, value) = (self.line(), Reader::value(key));
        if head == "$-1\r\n" {
            return false;
        }
        assert_eq!(head, format!("${}\r\n", value.len()));
        let mut body = vec![0; value.len() + 2];
        self.replies.read_exact(&mut body).unwrap();
        assert!(body[..value.len()] == value[..], "{name}: other bytes");
        true
    }
}

/// Reads everything again and again until told to stop; returns reads and misses.
fn read_until(address: Value, keys: usize, stop: &std::sync::atomic::AtomicBool) -> (usize, usize) {
    let mut reader = Reader::connect(&address);
    let (mut reads, mut misses) = (0, 0);
    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
        for key in 0..keys {
            reads += 1;
            misses += usize::from(!reader.get(key));
        }
    }
    (reads, misses)
}

/// Faults O35 and O36 with real processes under load: 4 -> 3 -> 4 shards without an error and hardly a miss, then a shard goes for
/// good.
#[test]
fn o35_o36_a_shard_drains_comes_back_and_is_removed_under_load() {
    const KEYS: usize = 400;
    let dev = Dev::start(&["--coordinators", "1", "--shards", "4", "--memory-per-shard", "64MiB"]);
    let proxy = dev.ready["proxy"]["resp"].clone();
    let mut writer = Reader::connect(&proxy);
    (0..KEYS).for_each(|key| writer.set(key));
    let stop = std::sync::atomic::AtomicBool::new(false);
    let slots = || {
        let of = |s: &Value| (s["slots"].as_u64().unwrap(), s["phase"].as_str().unwrap().to_owned());
        dev.get("shards").iter().map(of).collect::<Vec<_>>()
    };
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| read_until(proxy.clone(), KEYS, &stop));
        // Ended also when a check below fails, or the scope would wait for ever.
        let checks = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let drained = dev.ask(&["drain", "shard", "shard-2"]);
            let said = String::from_utf8_lossy(&drained.stdout).into_owned();
            assert!(
                drained.status.success() && said.ends_with("shard/shard-2 drained\n"),
                "{said}{drained:?}"
            );
            assert_eq!(slots()[1], (0, "Drained".to_owned()));
            let refused = dev.ask(&["remove", "shard", "shard-2"]);
            assert_eq!(refused.status.code(), Some(1));
            assert!(
                String::from_utf8_lossy(&refused.stderr).contains("still runs"),
                "{refused:?}"
            );
            assert!(dev.ask(&["undrain", "shard", "shard-2"]).status.success());
            wait_for("its share to come back", || (slots()[1].0 == 8_192).then_some(()));
        }));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let (reads, misses) = reading.join().unwrap();
        if let Err(failed) = checks {
            std::panic::resume_unwind(failed);
        }
        println!("{reads} reads, {misses} misses");
        assert!(reads >= KEYS && misses * 100 <= reads, "{misses} misses of {reads}");
    });
    let mut reader = Reader::connect(&proxy);
    let hits = (0..KEYS).filter(|key| reader.get(*key)).count();
    assert!(hits * 100 >= KEYS * 98, "{hits} of {KEYS} are left");

    let leaving = ["drain", "shard", "shard-4", "--give-up-after", "200s"];
    assert!(dev.ask(&leaving).status.success());
    let pid = i32::try_from(dev.ready["shards"][3]["pid"].as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
    wait_for("it to be removable", || {
        dev.ask(&["remove", "shard", "shard-4"]).status.success().then_some(())
    });
    assert_eq!(dev.get("shards").len(), 3);
    let status = dev.ask(&["status"]);
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stdout));
}
