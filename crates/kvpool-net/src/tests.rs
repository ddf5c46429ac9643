//! Real handshakes over loopback, with a CA made for each test.

use super::*;
use kvpool_proto::Timing;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::task::{Context, Poll};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;

struct Ca {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: TempDir,
}

impl Ca {
    fn new() -> Ca {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ca.pem"), issuer.pem()).unwrap();
        Ca { issuer, dir }
    }

    fn files(&self, role: Role, name: &str) -> TlsFiles {
        self.files_for(&names_for(role, name).unwrap())
    }

    fn files_for(&self, names: &[String]) -> TlsFiles {
        let key = KeyPair::generate().unwrap();
        let cert = CertificateParams::new(names.to_vec()).unwrap();
        let cert = cert.signed_by(&key, &self.issuer).unwrap();
        let at = |kind: &str| {
            self.dir
                .path()
                .join(format!("{}.{kind}", names.join("+").replace('*', "any")))
        };
        std::fs::write(at("pem"), cert.pem()).unwrap();
        std::fs::write(at("key"), key.serialize_pem()).unwrap();
        TlsFiles {
            ca: self.dir.path().join("ca.pem"),
            cert: at("pem"),
            key: at("key"),
        }
    }

    fn trust(&self, role: Role, name: &str) -> Trust {
        Trust::load(&self.files(role, name)).unwrap()
    }
}

/// Answers every call with the caller's words in a header.
#[derive(Clone)]
struct WhoAmI;

impl NamedService for WhoAmI {
    const NAME: &'static str = "test.WhoAmI";
}

impl Service<http::Request<Body>> for WhoAmI {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let request = tonic::Request::from_http(request);
        let words = Caller::of(request.extensions()).words();
        let response = http::Response::builder()
            .header("content-type", "application/grpc")
            .header("grpc-status", "0")
            .header("caller", words)
            .body(Body::empty())
            .unwrap();
        Box::pin(async move { Ok(response) })
    }
}

/// A stream whose peer's certificate is shown as a listener of kvpool shows it.
struct Plainly(TcpStream);

impl tonic::transport::server::Connected for Plainly {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

macro_rules! forward {
    ($($poll:ident($($arg:ident: $ty:ty),*) -> $out:ty;)*) => {
        $(fn $poll(mut self: std::pin::Pin<&mut Self>, cx: &mut Context<'_>, $($arg: $ty),*) -> Poll<std::io::Result<$out>> {
            std::pin::Pin::new(&mut self.0).$poll(cx, $($arg),*)
        })*
    };
}

impl tokio::io::AsyncRead for Plainly {
    forward! { poll_read(buf: &mut tokio::io::ReadBuf<'_>) -> (); }
}

impl tokio::io::AsyncWrite for Plainly {
    forward! {
        poll_write(buf: &[u8]) -> usize;
        poll_flush() -> ();
        poll_shutdown() -> ();
    }
}

async fn serve(trust: Trust) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = TcpListenerStream::new(listener).map(|s| s.map(Plainly));
    let server = trust
        .server()
        .unwrap()
        .add_service(WhoAmI)
        .serve_with_incoming(incoming);
    tokio::spawn(server);
    address
}

/// Who the server says we are, or why there was no answer.
async fn ask(trust: &Trust, address: SocketAddr) -> Result<String, String> {
    let endpoint = trust.endpoint(&address.to_string(), Timing::Relaxed)?;
    let mut channel = endpoint.connect().await.map_err(|e| format!("{e:?}"))?;
    let request = http::Request::builder()
        .method("POST")
        .uri(format!("http://{address}/test.WhoAmI/Ask"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::empty())
        .unwrap();
    futures::future::poll_fn(|cx| channel.poll_ready(cx))
        .await
        .map_err(|e| format!("{e:?}"))?;
    let reply = channel.call(request).await.map_err(|e| format!("{e:?}"))?;
    Ok(reply.headers()["caller"].to_str().unwrap().to_owned())
}

#[tokio::test]
async fn both_sides_know_each_other_by_name() {
    let ca = Ca::new();
    let member = serve(ca.trust(Role::Member, "1")).await;
    assert_eq!(
        ask(&ca.trust(Role::Shard, "shard-7"), member).await.unwrap(),
        "shard shard-7"
    );
    assert_eq!(ask(&ca.trust(Role::Proxy, "*"), member).await.unwrap(), "proxy *");
    let plain = serve(Trust::Plain).await;
    assert_eq!(ask(&Trust::Plain, plain).await.unwrap(), "an unnamed caller");
}

#[tokio::test]
async fn whoever_is_not_of_the_ca_gets_no_answer() {
    let (ca, other) = (Ca::new(), Ca::new());
    let member = serve(ca.trust(Role::Member, "1")).await;
    assert!(
        ask(&other.trust(Role::Member, "1"), member).await.is_err(),
        "another CA"
    );
    assert!(ask(&Trust::Plain, member).await.is_err(), "no TLS");
    let impostor = serve(other.trust(Role::Member, "1")).await;
    assert!(
        ask(&ca.trust(Role::Shard, "s"), impostor).await.is_err(),
        "a server of another CA"
    );
    let plain = serve(Trust::Plain).await;
    assert!(
        ask(&ca.trust(Role::Shard, "s"), plain).await.is_err(),
        "a server without TLS"
    );
    // The right CA, but a shard where a member should be.
    let shard = serve(ca.trust(Role::Shard, "shard-1")).await;
    assert!(
        ask(&ca.trust(Role::Shard, "s"), shard).await.is_err(),
        "a shard is no member"
    );
    // Whoever was refused did not hurt the listener.
    assert!(ask(&ca.trust(Role::Person, "ada"), member).await.is_ok());
}

#[tokio::test]
async fn a_certificate_with_foreign_names_is_nobody() {
    let ca = Ca::new();
    let member = serve(ca.trust(Role::Member, "1")).await;
    let foreign = Trust::load(&ca.files_for(&["member.kvpool".into(), "example.org".into()])).unwrap();
    assert_eq!(
        ask(&foreign, member).await.unwrap(),
        "a certificate without a name of kvpool"
    );
}

#[test]
fn files_that_do_not_fit_are_named() {
    let ca = Ca::new();
    let good = ca.files(Role::Member, "1");
    let other = ca.files(Role::Member, "2");
    let said = |files: TlsFiles| Trust::load(&files).unwrap_err().to_string();
    let missing = said(TlsFiles {
        ca: PathBuf::from("/nowhere/ca.pem"),
        ..good.clone()
    });
    assert!(
        missing.contains("CA certificate") && missing.contains("/nowhere/ca.pem"),
        "{missing}"
    );
    let swapped = said(TlsFiles {
        key: good.cert.clone(),
        ..good.clone()
    });
    assert!(swapped.contains("private key"), "{swapped}");
    let mixed = said(TlsFiles {
        key: other.key,
        ..good.clone()
    });
    assert!(mixed.contains("1.member.kvpool.pem"), "{mixed}");
    let large = ca.dir.path().join("large");
    std::fs::File::create(&large).unwrap().set_len(2 << 20).unwrap();
    let large = said(TlsFiles {
        cert: large,
        ..good.clone()
    });
    assert!(large.contains("larger"), "{large}");
    assert!(!format!("{:?}", Trust::load(&good).unwrap()).contains("KEY"));
}
