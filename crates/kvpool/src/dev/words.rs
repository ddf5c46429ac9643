//! What `kvpool dev` says to people.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use super::child::Ended;
use super::home::Home;
use super::plan::Plan;
use super::ports::at;
use crate::ctl::table::table;
use crate::ctl::text::count;

/// The program's name as the user typed it, so that the hints can be pasted.
fn program() -> String {
    std::env::args().next().unwrap_or_else(|| "kvpool".to_owned())
}

/// Said once, when the pool is ready.
pub fn welcome(plan: &Plan, home: &Home, pids: &[u32], took: Duration) -> String {
    let (resp, lm, http) = (plan.ports.proxy.resp, plan.ports.proxy.lm, plan.ports.proxy.http);
    let keeps = if home.is_temporary() {
        "nothing is kept at the end"
    } else {
        "state is kept"
    };
    let program = program();
    let rows = plan.children.iter().zip(pids).map(|(spec, pid)| {
        vec![
            spec.name.clone(),
            pid.to_string(),
            format!("http://{}/metrics", spec.http),
        ]
    });
    let processes = table(&["NAME", "PID", "METRICS"], rows);
    format!(
        "kvpool is ready after {:.1} s: {}, {} of {}, factor {}, 1 proxy.

LMCache: one of these lines in its configuration
  remote_url: \"redis://{resp}\"
  remote_url: \"resp://{resp}\"      # with save_unfull_chunk: false, extra_config: {{\"save_chunk_meta\": false}}
  remote_url: \"lm://{lm}\"       # LMCache 0.3.3 to 0.5.6
LMCache multi-process server:
  --l2-adapter '{{\"type\": \"resp\", \"host\": \"127.0.0.1\", \"port\": {resp_port}}}'

Look at it from another terminal:
  export KVPOOL_ENDPOINTS={} KVPOOL_JOIN_TOKEN_FILE={}
  {program} status
  {program} get shards
  redis-cli -p {resp_port} info
  curl http://{}/metrics

{}
Data and logs: {}/NAME/NAME.log ({keeps})
Stop everything with Ctrl-C.
",
        took.as_secs_f64(),
        count(plan.ports.coordinators.len(), "coordinator"),
        count(plan.ports.shards.len(), "shard"),
        plan.memory,
        plan.factor,
        plan.endpoints(),
        home.token_file().display(),
        at(http),
        processes,
        home.root().display(),
        resp = at(resp),
        lm = at(lm),
        resp_port = resp,
    )
}

/// Said when a child has ended by itself.
pub fn ended(ended: &Ended, plan: &Plan, home: &Home) -> String {
    let again = plan
        .children
        .iter()
        .find(|spec| spec.name == ended.name)
        .map_or_else(String::new, |spec| {
            // The parent's pid means nothing to a process that is started by hand.
            let parent = spec.args.iter().position(|arg| arg == "--parent-pid");
            let keep = |i: &usize| parent.is_none_or(|p| *i != p && *i != p + 1);
            let args: Vec<&str> = (0..spec.args.len())
                .filter(keep)
                .map(|i| spec.args[i].as_str())
                .collect();
            format!(
                "KVPOOL_JOIN_TOKEN_FILE={} {} {}",
                home.token_file().display(),
                program(),
                args.join(" ")
            )
        });
    format!(
        "{} ended ({}). It is not restarted; to start it again:\n  {again}\n",
        ended.name,
        how(ended.status)
    )
}

/// How a process ended.
pub fn how(status: Option<ExitStatus>) -> String {
    match status.map(|s| (s.code(), s.signal())) {
        Some((Some(code), _)) => format!("exit code {code}"),
        Some((None, Some(signal))) => format!("signal {signal}"),
        _ => "unknown".to_owned(),
    }
}
