//! Which process a connection comes from: its port, looked up in the kernel's tables.
//!
//! All members share 127.0.0.1 as their source, so the address tells nothing; the socket's inode does.

use std::collections::BTreeMap;

/// The name of the process that holds the socket `client_port` -> `listener_port`; `None` when it is none of `pids`.
#[must_use]
pub fn owner(client_port: u16, listener_port: u16, pids: &BTreeMap<String, u32>) -> Option<String> {
    let table = std::fs::read_to_string("/proc/net/tcp").ok()?;
    let inode = inode(&table, client_port, listener_port)?;
    let link = format!("socket:[{inode}]");
    let holds = |pid: u32| {
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten()
            .flatten();
        entries
            .filter_map(|entry| std::fs::read_link(entry.path()).ok())
            .any(|target| target.as_os_str() == link.as_str())
    };
    pids.iter().find(|(_, pid)| holds(**pid)).map(|(name, _)| name.clone())
}

/// The inode of a socket in the text of `/proc/net/tcp` (proc_pid_net(5): local and remote address, state, inode).
fn inode(table: &str, local: u16, remote: u16) -> Option<&str> {
    let port = |field: &str| u16::from_str_radix(field.rsplit(':').next()?, 16).ok();
    table.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let ours = port(fields.get(1)?) == Some(local) && port(fields.get(2)?) == Some(remote);
        fields.get(9).copied().filter(|_| ours)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_ours_when_we_made_it() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap().port();
        let client = std::net::TcpStream::connect(("127.0.0.1", to)).unwrap();
        let from = client.local_addr().unwrap().port();
        let me = BTreeMap::from([("me".to_owned(), std::process::id())]);
        assert_eq!(owner(from, to, &me).as_deref(), Some("me"));
        assert_eq!(owner(from, to, &BTreeMap::from([("init".to_owned(), 1)])), None);
        assert_eq!(owner(to, from, &BTreeMap::new()), None);
    }

    #[test]
    fn odd_tables_name_nobody() {
        for table in [
            "",
            "head",
            "head\n",
            "head\n0: x y",
            "head\n0: 0100007F:ZZZZ 0100007F:0050 01 a b c d e 7",
        ] {
            assert_eq!(inode(table, 1, 80), None);
        }
        let table = "head\n 0: 0100007F:0001 0100007F:0050 01 0:0 0:0 0 0 0 777 1";
        assert_eq!(inode(table, 1, 80), Some("777"));
    }
}
