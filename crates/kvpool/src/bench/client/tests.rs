//! The clients against a scripted loopback server: replies in pieces, misses, and replies that must be refused.

use std::net::TcpListener;
use std::thread::JoinHandle;

use super::*;

/// Serves one connection: for each step reads `expect` and answers with the pieces, one segment each.
fn scripted(steps: Vec<(Vec<u8>, Vec<Vec<u8>>)>) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_nodelay(true).unwrap();
        for (expect, pieces) in steps {
            let mut request = vec![0; expect.len()];
            stream.read_exact(&mut request).unwrap();
            assert_eq!(request, expect, "the request");
            for piece in pieces {
                stream.write_all(&piece).unwrap();
                std::thread::yield_now();
            }
        }
    });
    (addr, server)
}

fn key() -> Key {
    Key {
        name: "k1".to_owned(),
        number: 1,
    }
}

#[test]
fn resp_requests_and_replies_in_pieces() {
    let get = b"*2\r\n$3\r\nGET\r\n$2\r\nk1\r\n".to_vec();
    let (addr, server) = scripted(vec![
        (
            b"*3\r\n$3\r\nSET\r\n$2\r\nk1\r\n$10\r\nhellohello\r\n".to_vec(),
            vec![b"+O".to_vec(), b"K\r\n".to_vec()],
        ),
        (
            get.clone(),
            vec![
                b"$".to_vec(),
                b"10\r\nhe".to_vec(),
                b"llohello\r".to_vec(),
                b"\n".to_vec(),
            ],
        ),
        (get.clone(), vec![b"$-".to_vec(), b"1\r\n".to_vec()]),
        (b"*2\r\n$6\r\nEXISTS\r\n$2\r\nk1\r\n".to_vec(), vec![b":1\r\n".to_vec()]),
        (get, vec![b"$11\r\nhellohelloo\r\n".to_vec()]),
    ]);
    let mut conn = Conn::open(addr, Protocol::Resp).unwrap();
    let mut body = [0; 10];
    conn.put(&key(), b"hellohello").unwrap();
    assert!(conn.get(&key(), &mut body).unwrap());
    assert_eq!(&body, b"hellohello");
    assert!(!conn.get(&key(), &mut body).unwrap());
    assert!(conn.exists(&key()).unwrap());
    assert!(
        conn.get(&key(), &mut body).is_err(),
        "another length is an error, not a value"
    );
    server.join().unwrap();
}

#[test]
fn lm_requests_and_replies_in_pieces() {
    let request = |command, length: u32, meta| {
        lm::LmRequest {
            command,
            length,
            meta,
            key: b"k1",
        }
        .encode()
        .to_vec()
    };
    let stored = lm::LmMeta {
        fmt: 4,
        dtype: 6,
        shape: [5, 0, 0, 0],
    };
    let asked = lm::LmMeta {
        fmt: 1,
        dtype: 2,
        shape: [0; 4],
    };
    let mut put = request(lm::LmCommand::Put, 5, stored);
    put.extend_from_slice(b"hello");
    let get = request(lm::LmCommand::Get, 0, asked);
    let hit = lm::LmReply {
        ok: true,
        length: 5,
        meta: stored,
    }
    .encode();
    let (addr, server) = scripted(vec![
        (put, vec![]),
        (
            request(lm::LmCommand::Exist, 0, asked),
            vec![lm::LmReply::OK.encode().to_vec()],
        ),
        (
            get.clone(),
            vec![hit[..20].to_vec(), [&hit[20..], &b"hel"[..]].concat(), b"lo".to_vec()],
        ),
        (get, vec![lm::LmReply::FAIL.encode().to_vec()]),
    ]);
    let mut conn = Conn::open(addr, Protocol::Lm).unwrap();
    let mut body = [0; 5];
    conn.put(&key(), b"hello").unwrap();
    assert!(conn.get(&key(), &mut body).unwrap());
    assert_eq!(&body, b"hello");
    assert!(!conn.get(&key(), &mut body).unwrap());
    server.join().unwrap();
}

#[test]
fn a_server_that_goes_away_or_complains_is_an_error() {
    let get = b"*2\r\n$3\r\nGET\r\n$2\r\nk1\r\n".to_vec();
    for reply in ["-ERR no\r\n", "$5\r\nhel"] {
        let (addr, server) = scripted(vec![(get.clone(), vec![reply.into()])]);
        let mut conn = Conn::open(addr, Protocol::Resp).unwrap();
        assert!(conn.get(&key(), &mut [0; 5]).is_err(), "{reply:?}");
        server.join().unwrap();
    }
}
