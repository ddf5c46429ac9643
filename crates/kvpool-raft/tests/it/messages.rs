//! Whatever comes in on the wire: an error or an answer, never a panic, and the member goes on.
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{Journal, Node, small};
use bytes::Bytes;
use kvpool_raft::{FileDisk, HandleError, Lane, MAX_MESSAGE_BYTES, Peer, RaftNode, Transport, TransportError};

/// Keeps what a member sends; nobody answers.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<(Lane, Bytes)>>>);

impl Transport for Recorder {
    async fn send(&self, _: &Peer, lane: Lane, message: Bytes, _: Duration) -> Result<Bytes, TransportError> {
        self.0.lock().unwrap().push((lane, message));
        Err(TransportError::Unreachable("nobody is there".to_string()))
    }
}

async fn member(id: u64, recorder: &Recorder, dir: &std::path::Path) -> Node {
    let disk = FileDisk::open(dir.join(id.to_string())).unwrap();
    RaftNode::start(small(id), disk, recorder.clone(), Journal::default())
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_any_kind_do_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let recorder = Recorder::default();
    let sender = member(1, &recorder, dir.path()).await;
    let receiver = member(2, &recorder, dir.path()).await;
    // A candidate's messages, recorded while it asks for votes.
    let members = [(1, "a".to_string()), (2, "b".to_string()), (3, "c".to_string())];
    drop(tokio::time::timeout(Duration::from_secs(5), sender.initialize(members.into())).await);
    let recorded: Vec<_> = recorder.0.lock().unwrap().drain(..).collect();
    let ballot = recorded.iter().find(|(lane, _)| *lane == Lane::Vote).unwrap().1.clone();

    for cut in 0..ballot.len() {
        assert!(
            receiver.handle(ballot.slice(..cut)).await.is_err() || cut > 0,
            "cut at {cut}"
        );
    }
    let mut state = 1u64;
    for _ in 0..2_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let len = (state >> 33) as usize % 200;
        let noise: Vec<u8> = (0..len)
            .map(|i| (state.rotate_left(i as u32 % 64) >> 7) as u8)
            .collect();
        drop(receiver.handle(Bytes::from(noise)).await);
    }
    let huge = Bytes::from(vec![10; MAX_MESSAGE_BYTES + 1]);
    assert!(matches!(receiver.handle(huge).await, Err(HandleError::Malformed(_))));
    // A field that claims to be longer than the message.
    assert!(
        receiver
            .handle(Bytes::from_static(&[10, 0xff, 0xff, 0xff, 0xff, 0x0f]))
            .await
            .is_err()
    );
    // A message for another member, as after an address changed hands.
    let misdirected = sender.handle(ballot.clone()).await;
    assert!(
        matches!(misdirected, Err(HandleError::Misdirected { .. })),
        "{misdirected:?}"
    );
    for node in [&sender, &receiver] {
        assert_eq!(node.status().fatal, None);
        node.shutdown().await;
    }
    assert!(matches!(
        receiver.handle(ballot).await,
        Err(HandleError::Fatal(_) | HandleError::Misdirected { .. })
    ));
}
