//! The network between the members: every address that a member is known by is a port of ours, and what passes meets the
//! rules of its direction.
//!
//! A member listens on 127.0.0.2 and is known as 127.0.0.1 with the same port. That port is held by this process for the
//! whole run, so that no other process can take it while the member is dead, and several runs stand side by side.
//! Connections from anybody who is not a member (the harness, the command line) pass untouched.

mod link;
mod owner;
mod rules;

pub use rules::{Condition, Rules};

use crate::dice::Dice;
use anyhow::{Context, Result};
use link::{Direction, Ended, carry};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Most connections carried at once.
const MAX_CONNECTIONS: usize = 4096;
const CONNECT: Duration = Duration::from_secs(5);
/// Where members listen; every address of 127.0.0.0/8 is there without being set up.
pub const INSIDE: [u8; 4] = [127, 0, 0, 2];
/// Where they are reached.
pub const OUTSIDE: [u8; 4] = [127, 0, 0, 1];

/// The network. Clones are the same network; it ends with [`Fabric::close`].
#[derive(Clone)]
pub struct Fabric(Arc<Inner>);

struct Inner {
    rules: watch::Sender<Rules>,
    pids: Mutex<BTreeMap<String, u32>>,
    open: Mutex<BTreeMap<u64, Open>>,
    next: AtomicU64,
    room: Arc<Semaphore>,
    dice: Dice,
    closed: CancellationToken,
}

/// A connection that is carried now.
struct Open {
    from: String,
    to: String,
    reset: CancellationToken,
}

impl Fabric {
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Fabric(Arc::new(Inner {
            rules: watch::Sender::new(Rules::default()),
            pids: Mutex::default(),
            open: Mutex::default(),
            next: AtomicU64::new(1),
            room: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            dice: Dice::new(seed),
            closed: CancellationToken::new(),
        }))
    }

    /// Opens a port of member `name`; it shall listen on the same port of [`INSIDE`].
    ///
    /// # Errors
    /// No port can be had.
    pub async fn open_port(&self, name: &str) -> Result<u16> {
        let listener = TcpListener::bind(SocketAddr::from((OUTSIDE, 0))).await;
        let listener = listener.with_context(|| format!("failed to open a port for {name}"))?;
        let port = listener.local_addr()?.port();
        tokio::spawn(serve(self.0.clone(), listener, name.to_owned(), port));
        Ok(port)
    }

    /// Connections from this process are `name`'s from now on.
    pub fn set_pid(&self, name: &str, pid: u32) {
        self.0.pids.lock().insert(name.to_owned(), pid);
    }

    /// Changes the rules, at once and for all connections.
    pub fn change(&self, how: impl FnOnce(&mut Rules)) {
        self.0.rules.send_modify(how);
    }

    /// Resets the connections between two members, whoever made them; how many there were.
    pub fn reset(&self, a: &str, b: &str) -> usize {
        let open = self.0.open.lock();
        let between = |o: &&Open| o.from == a && o.to == b || o.from == b && o.to == a;
        open.values().filter(between).map(|o| o.reset.cancel()).count()
    }

    /// Ends everything.
    pub fn close(&self) {
        self.0.closed.cancel();
    }
}

async fn serve(inner: Arc<Inner>, listener: TcpListener, to: String, port: u16) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = inner.closed.cancelled() => return,
        };
        let Ok((stream, peer)) = accepted else {
            // Out of descriptors, or the client went away: neither ends the network.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let Ok(room) = inner.room.clone().try_acquire_owned() else {
            continue;
        };
        let (inner, to) = (inner.clone(), to.clone());
        tokio::spawn(async move {
            let closed = inner.closed.clone();
            tokio::select! {
                () = connection(inner, stream, peer, &to, port) => {}
                () = closed.cancelled() => {}
            }
            drop(room);
        });
    }
}

async fn connection(inner: Arc<Inner>, client: TcpStream, peer: SocketAddr, to: &str, port: u16) {
    let pids = inner.pids.lock().clone();
    let found = tokio::task::spawn_blocking(move || owner::owner(peer.port(), port, &pids)).await;
    let from = found.ok().flatten().unwrap_or_else(|| "outside".to_owned());
    let mut rules = inner.rules.subscribe();
    if rules.wait_for(|r| !r.silent(&from, to)).await.is_err() {
        return;
    }
    let server = timeout(CONNECT, TcpStream::connect(SocketAddr::from((INSIDE, port)))).await;
    let Ok(Ok(server)) = server else {
        reset(&client);
        return;
    };
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);
    let id = inner.next.fetch_add(1, Ordering::Relaxed);
    let token = CancellationToken::new();
    let entry = Open {
        from: from.clone(),
        to: to.to_owned(),
        reset: token.clone(),
    };
    inner.open.lock().insert(id, entry);
    carry_both(&inner, client, server, (from, to.to_owned()), &token, id).await;
    inner.open.lock().remove(&id);
}

async fn carry_both(
    inner: &Inner,
    mut client: TcpStream,
    mut server: TcpStream,
    (from, to): (String, String),
    token: &CancellationToken,
    id: u64,
) {
    let (client_in, client_out) = client.split();
    let (server_in, server_out) = server.split();
    let direction = |from: &str, to: &str, n: u64| Direction {
        from: from.to_owned(),
        to: to.to_owned(),
        rules: inner.rules.subscribe(),
        dice: inner.dice.fork(id * 2 + n),
    };
    let there = carry(client_in, server_out, direction(&from, &to, 0));
    let back = carry(server_in, client_out, direction(&to, &from, 1));
    let broken = either(there, back, token).await;
    if broken {
        reset(&client);
        reset(&server);
    }
}

/// Waits for both directions, or for the first that breaks; true when one did, or the connection shall be reset.
async fn either(
    there: impl Future<Output = Ended>,
    back: impl Future<Output = Ended>,
    token: &CancellationToken,
) -> bool {
    tokio::pin!(there, back);
    let (mut there_done, mut back_done) = (false, false);
    while !(there_done && back_done) {
        let ended = tokio::select! {
            ended = &mut there, if !there_done => { there_done = true; ended }
            ended = &mut back, if !back_done => { back_done = true; ended }
            () = token.cancelled() => Ended::Broken,
        };
        if ended == Ended::Broken {
            return true;
        }
    }
    false
}

/// The next close sends RST.
fn reset(stream: &TcpStream) {
    let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

#[cfg(test)]
mod tests;
