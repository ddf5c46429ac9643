//! Commands that touch no block: what clients send when they connect, and what they ask about the server.
//!
//! The table is also what COMMAND shows and where arity is checked. Commands that would change or stop a server are
//! refused with the error Redis gives to a user without the right to run them.

use std::sync::atomic::{AtomicU64, Ordering};

use kvpool_wire::resp::{Args, Proto, ReplyWriter, parse_integer};

/// The Redis version whose behaviour is imitated; clients choose features by it.
const REDIS_VERSION: &str = "7.0.0";

/// One command as COMMAND describes it. `arity` counts the name; negative means "at least".
pub(super) struct Command {
    pub(super) name: &'static str,
    arity: i64,
    flags: &'static [&'static str],
    /// First key, last key, step; zeros for none.
    keys: [i64; 3],
}

impl Command {
    /// Whether a request with this many arguments (the name included) is well formed.
    pub(super) fn takes(&self, args: usize) -> bool {
        let args = args as i64;
        if self.arity < 0 {
            args >= -self.arity
        } else {
            args == self.arity
        }
    }
}

const READ: &[&str] = &["readonly", "fast"];
const WRITE: &[&str] = &["write"];
const FAST: &[&str] = &["fast"];
const CONNECT: &[&str] = &["noscript", "loading", "stale", "fast", "no_auth"];

const fn command(name: &'static str, arity: i64, flags: &'static [&'static str], keys: [i64; 3]) -> Command {
    Command {
        name,
        arity,
        flags,
        keys,
    }
}

/// The hot ones first: the table is searched in order.
static COMMANDS: [Command; 18] = [
    command("GET", 2, READ, [1, 1, 1]),
    command("SET", -3, WRITE, [1, 1, 1]),
    command("EXISTS", -2, READ, [1, -1, 1]),
    command("DEL", -2, WRITE, [1, -1, 1]),
    command("UNLINK", -2, WRITE, [1, -1, 1]),
    command("TTL", 2, READ, [1, 1, 1]),
    command("EXPIRE", 3, WRITE, [1, 1, 1]),
    command("PING", -1, FAST, [0, 0, 0]),
    command("WAIT", 3, FAST, [0, 0, 0]),
    command("HELLO", -1, CONNECT, [0, 0, 0]),
    command("AUTH", -2, CONNECT, [0, 0, 0]),
    command("SELECT", 2, FAST, [0, 0, 0]),
    command("CLIENT", -2, CONNECT, [0, 0, 0]),
    command("INFO", -1, FAST, [0, 0, 0]),
    command("COMMAND", -1, FAST, [0, 0, 0]),
    command("DBSIZE", 1, READ, [0, 0, 0]),
    command("QUIT", -1, CONNECT, [0, 0, 0]),
    command("ECHO", 2, FAST, [0, 0, 0]),
];

/// Refused by name: they would destroy data, change the server, run code, or move it elsewhere.
const FORBIDDEN: [&str; 24] = [
    "FLUSHALL",
    "FLUSHDB",
    "CONFIG",
    "DEBUG",
    "SHUTDOWN",
    "EVAL",
    "EVALSHA",
    "EVAL_RO",
    "EVALSHA_RO",
    "SCRIPT",
    "FUNCTION",
    "FCALL",
    "FCALL_RO",
    "REPLICAOF",
    "SLAVEOF",
    "SAVE",
    "BGSAVE",
    "BGREWRITEAOF",
    "MIGRATE",
    "MODULE",
    "ACL",
    "FAILOVER",
    "SWAPDB",
    "MONITOR",
];

/// The command of this name, in any case.
pub(super) fn lookup(name: &[u8]) -> Option<&'static Command> {
    COMMANDS
        .iter()
        .find(|command| name.eq_ignore_ascii_case(command.name.as_bytes()))
}

/// What a connection has negotiated.
pub(super) struct Session {
    pub(super) proto: Proto,
    id: u64,
    name: Vec<u8>,
}

impl Session {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Session {
            proto: Proto::V2,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            name: Vec::new(),
        }
    }
}

/// Refuses a command that is not served, in Redis' words.
pub(super) fn unknown(args: &Args, reply: &mut ReplyWriter<'_>) {
    let name = args.get(0);
    if let Some(known) = FORBIDDEN
        .iter()
        .find(|known| name.eq_ignore_ascii_case(known.as_bytes()))
    {
        let known = known.to_ascii_lowercase();
        return reply.error(&format!(
            "NOPERM User default has no permissions to run the '{known}' command"
        ));
    }
    let mut shown = String::new();
    for arg in args.iter_from(1) {
        if shown.len() >= 128 {
            break;
        }
        shown.push_str(&format!("'{}' ", text(arg)));
    }
    reply.error(&format!(
        "ERR unknown command '{}', with args beginning with: {shown}",
        text(name)
    ));
}

/// At most 128 bytes of an argument, fit for an error line.
fn text(arg: &[u8]) -> String {
    String::from_utf8_lossy(&arg[..arg.len().min(128)]).into_owned()
}

/// Answers a command of the table that routing has no part in.
pub(super) fn answer(command: &Command, args: &Args, session: &mut Session, keys: u64, out: &mut Vec<u8>) {
    if command.name == "HELLO" {
        return hello(args, session, out);
    }
    let mut reply = ReplyWriter::new(out, session.proto);
    match command.name {
        "PING" => match args.len() {
            1 => reply.simple("PONG"),
            2 => reply.bulk(args.get(1)),
            _ => reply.error("ERR wrong number of arguments for 'ping' command"),
        },
        "ECHO" => reply.bulk(args.get(1)),
        // There are no passwords yet; a client that has one configured must not fail for it.
        "AUTH" => reply.simple("OK"),
        "SELECT" => match parse_integer(args.get(1)) {
            Some(0) => reply.simple("OK"),
            Some(_) => reply.error("ERR DB index is out of range"),
            None => reply.error("ERR value is not an integer or out of range"),
        },
        "CLIENT" => client(args, session, &mut reply),
        "INFO" => reply.bulk(info(args, keys).as_bytes()),
        "COMMAND" => show_commands(args, &mut reply),
        "DBSIZE" => reply.integer(i64::try_from(keys).unwrap_or(i64::MAX)),
        _ => reply.error("ERR command is not served here"),
    }
}

/// `HELLO [2|3 [AUTH user password] [SETNAME name]]`.
fn hello(args: &Args, session: &mut Session, out: &mut Vec<u8>) {
    let refuse = |session: &Session, out: &mut Vec<u8>, text: &str| {
        ReplyWriter::new(out, session.proto).error(text);
    };
    let proto = match args.get(1) {
        _ if args.len() == 1 => session.proto,
        b"2" => Proto::V2,
        b"3" => Proto::V3,
        other if parse_integer(other).is_none() => {
            let text = "ERR Protocol version is not an integer or out of range";
            return refuse(session, out, text);
        }
        _ => return refuse(session, out, "NOPROTO unsupported protocol version"),
    };
    let mut at = 2;
    let mut name = None;
    while at < args.len() {
        let option = args.get(at);
        if option.eq_ignore_ascii_case(b"AUTH") && at + 2 < args.len() {
            at += 3;
        } else if option.eq_ignore_ascii_case(b"SETNAME") && at + 1 < args.len() {
            name = Some(args.get(at + 1).to_vec());
            at += 2;
        } else {
            let text = format!("ERR Syntax error in HELLO option '{}'", text(option));
            return refuse(session, out, &text);
        }
    }
    session.proto = proto;
    if let Some(name) = name {
        session.name = name;
    }
    let mut reply = ReplyWriter::new(out, proto);
    reply.map(7);
    for (field, value) in [
        ("server", "redis"),
        ("version", REDIS_VERSION),
        ("mode", "standalone"),
        ("role", "master"),
    ] {
        reply.bulk(field.as_bytes());
        reply.bulk(value.as_bytes());
    }
    reply.bulk(b"proto");
    reply.integer(if proto == Proto::V3 { 3 } else { 2 });
    reply.bulk(b"id");
    reply.integer(session.id as i64);
    reply.bulk(b"modules");
    reply.array(0);
}

fn client(args: &Args, session: &mut Session, reply: &mut ReplyWriter<'_>) {
    let sub = args.get(1).to_ascii_uppercase();
    match (&sub[..], args.len()) {
        (b"SETINFO", 4) | (b"NO-EVICT" | b"NO-TOUCH", 3) => reply.simple("OK"),
        (b"ID", 2) => reply.integer(session.id as i64),
        (b"GETNAME", 2) if session.name.is_empty() => reply.null(),
        (b"GETNAME", 2) => reply.bulk(&session.name),
        (b"SETNAME", 3) => {
            let name = args.get(2);
            if name.iter().all(|byte| byte.is_ascii_graphic()) {
                session.name = name.to_vec();
                reply.simple("OK");
            } else {
                reply.error("ERR Client names cannot contain spaces, newlines or special characters.");
            }
        }
        (b"INFO" | b"LIST", 2) => {
            let proto = if session.proto == Proto::V3 { 3 } else { 2 };
            let line = format!("id={} name={} db=0 resp={proto}\n", session.id, text(&session.name));
            reply.bulk(line.as_bytes());
        }
        _ => reply.error(&format!(
            "ERR unknown subcommand or wrong number of arguments for '{}'. Try CLIENT HELP.",
            text(args.get(1))
        )),
    }
}

/// The sections of INFO that clients look at; `role:master` is what glide insists on.
fn info(args: &Args, keys: u64) -> String {
    let wanted = |section: &str| {
        args.len() == 1
            || args.iter_from(1).any(|arg| {
                [section, "all", "default", "everything"]
                    .iter()
                    .any(|word| arg.eq_ignore_ascii_case(word.as_bytes()))
            })
    };
    let mut out = String::new();
    if wanted("server") {
        out.push_str(&format!(
            "# Server\r\nredis_version:{REDIS_VERSION}\r\nredis_mode:standalone\r\nkvpool_version:{}\r\n\
             process_id:{}\r\n\r\n",
            env!("CARGO_PKG_VERSION"),
            std::process::id()
        ));
    }
    if wanted("replication") {
        out.push_str("# Replication\r\nrole:master\r\nconnected_slaves:0\r\n\r\n");
    }
    if wanted("persistence") {
        out.push_str("# Persistence\r\nloading:0\r\n\r\n");
    }
    if wanted("keyspace") {
        out.push_str("# Keyspace\r\n");
        if keys > 0 {
            out.push_str(&format!("db0:keys={keys},expires=0,avg_ttl=0\r\n"));
        }
    }
    out
}

fn show_commands(args: &Args, reply: &mut ReplyWriter<'_>) {
    let sub = args.get(1);
    if args.len() == 1 {
        reply.array(COMMANDS.len());
        COMMANDS.iter().for_each(|command| show(command, reply));
    } else if sub.eq_ignore_ascii_case(b"COUNT") {
        reply.integer(COMMANDS.len() as i64);
    } else if sub.eq_ignore_ascii_case(b"DOCS") {
        // Clients show these as help; an empty map is a valid answer.
        reply.map(0);
    } else if sub.eq_ignore_ascii_case(b"INFO") {
        reply.array(args.len() - 2);
        for name in args.iter_from(2) {
            match lookup(name) {
                Some(command) => show(command, reply),
                None => reply.null(),
            }
        }
    } else {
        reply.error(&format!("ERR unknown subcommand '{}'. Try COMMAND HELP.", text(sub)));
    }
}

fn show(command: &Command, reply: &mut ReplyWriter<'_>) {
    reply.array(6);
    reply.bulk(command.name.to_ascii_lowercase().as_bytes());
    reply.integer(command.arity);
    reply.set(command.flags.len());
    command.flags.iter().for_each(|flag| reply.simple(flag));
    command.keys.iter().for_each(|&key| reply.integer(key));
}
