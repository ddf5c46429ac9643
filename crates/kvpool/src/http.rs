//! The small HTTP server of each process: `/livez`, `/readyz`, `/metrics`.
//!
//! It answers probes and scrapes and nothing else, so everything about it is bounded: connections, header size and time,
//! bodies (refused unread) and the age of a connection.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Connections served at once; more are closed at once and counted.
const MAX_CONNECTIONS: usize = 64;
/// Time to send a request's head, also the longest idle time between two requests.
const HEADER_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest life of a connection: it bounds readers that take their reply byte by byte.
const MAX_AGE: Duration = Duration::from_secs(600);
/// Size of a request's head, in bytes.
const MAX_HEAD: usize = 16 << 10;
/// Pause after a failed accept (out of file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

const REFUSED: &str = "kvpool_http_connections_refused_total";

/// Describes the metrics of this module.
pub fn describe() {
    metrics::describe_counter!(REFUSED, "HTTP connections closed at once because too many are open");
}

/// Why a process cannot serve. Empty: it can.
pub type Obstacles = Vec<String>;

/// What the routes need.
#[derive(Clone)]
pub struct Probes {
    metrics: PrometheusHandle,
    obstacles: Arc<dyn Fn() -> Obstacles + Send + Sync>,
}

impl Probes {
    /// `obstacles` is asked at each `/readyz`; it must not block.
    pub fn new(metrics: PrometheusHandle, obstacles: impl Fn() -> Obstacles + Send + Sync + 'static) -> Self {
        Probes {
            metrics,
            obstacles: Arc::new(obstacles),
        }
    }
}

fn router(probes: Probes) -> Router {
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .fallback(|| async { (StatusCode::NOT_FOUND, "try /livez, /readyz or /metrics\n") })
        .with_state(probes)
}

async fn readyz(State(probes): State<Probes>) -> impl IntoResponse {
    let obstacles = (probes.obstacles)();
    if obstacles.is_empty() {
        (StatusCode::OK, "ready\n".to_owned())
    } else {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("not ready: {}\n", obstacles.join("; ")),
        )
    }
}

async fn scrape(State(probes): State<Probes>) -> impl IntoResponse {
    crate::telemetry::process::collect();
    (
        [(header::CONTENT_TYPE, "text/plain; version=0.0.4")],
        probes.metrics.render(),
    )
}

/// Serves until `shutdown`, then lets open requests finish (they are short) and returns.
pub async fn serve(listener: TcpListener, probes: Probes, shutdown: CancellationToken) {
    let router = router(probes);
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            () = shutdown.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let Ok(permit) = room.clone().try_acquire_owned() else {
            metrics::counter!(REFUSED).increment(1);
            continue;
        };
        let (router, shutdown) = (router.clone(), shutdown.clone());
        tokio::spawn(async move {
            connection(stream, router, shutdown).await;
            drop(permit);
        });
    }
}

async fn connection(stream: TcpStream, router: Router, shutdown: CancellationToken) {
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEAD);
    let served = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    tokio::pin!(served);
    let ended = tokio::select! {
        result = served.as_mut() => result,
        () = shutdown.cancelled() => {
            served.as_mut().graceful_shutdown();
            // The process ends soon after; a reader that is slower than that loses its reply.
            served.await
        }
        () = tokio::time::sleep(MAX_AGE) => Ok(()),
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an HTTP connection ended early");
    }
}

#[cfg(test)]
mod tests;
