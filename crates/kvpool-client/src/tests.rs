use super::*;
use kvpool_proto::meta::{Reason, Refused};
use std::time::Duration;

fn client(endpoints: &[&str]) -> Client {
    Client::new(ClientConfig {
        endpoints: endpoints.iter().map(|e| (*e).to_owned()).collect(),
        join_token: "secret".parse().unwrap(),
        trust: crate::Trust::Plain,
        timing: Timing::Normal,
    })
}

#[test]
fn futures_can_be_spawned() {
    fn is_send<T: Send>(_: &T) {}
    let c = client(&[]);
    is_send(&c.list(Kind::Shard));
    is_send(&c.status());
    is_send(&c.configure_pool("default", 2));
}

#[tokio::test]
async fn nobody_to_ask_is_an_error_not_a_hang() {
    let err = client(&[]).status().await.unwrap_err();
    assert_eq!(err.word(), "unreachable");
    let err = client(&["not an address"]).status().await.unwrap_err();
    assert_eq!(err.word(), "unreachable", "{err}");
}

#[test]
fn secrets_are_not_in_debug_output_or_errors() {
    let config = ClientConfig {
        endpoints: vec!["127.0.0.1:1".into()],
        join_token: "secret".parse().unwrap(),
        trust: crate::Trust::Plain,
        timing: Timing::Normal,
    };
    assert!(!format!("{config:?}").contains("secret"));
    let refused = Refused::new(Reason::JoinToken, "the join token is not this cluster's")
        .with_retry_after(Duration::from_secs(1));
    let text = ClientError::Refused(Box::new(refused)).to_string();
    assert_eq!(text, "failed: join_token: the join token is not this cluster's");
}
