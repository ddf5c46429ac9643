//! What a process says at `/metrics`.

use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Longest page that is read, in bytes.
const MAX_PAGE: u64 = 16 << 20;
const ANSWER: Duration = Duration::from_secs(10);

/// One scrape: series with their labels as they stand, and their values.
#[derive(Clone, Debug, Default)]
pub struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    /// # Errors
    /// No answer in time, or not a page.
    pub async fn scrape(address: &str) -> Result<Self> {
        timeout(ANSWER, fetch(address))
            .await
            .with_context(|| format!("{address}/metrics did not answer within {ANSWER:?}"))?
    }

    #[must_use]
    pub fn parse(page: &str) -> Self {
        let series = page.lines().filter(|line| !line.starts_with('#'));
        let series = series.filter_map(|line| line.trim().rsplit_once(' '));
        Metrics(
            series
                .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
                .collect(),
        )
    }

    /// Sum over the series of a name whose labels hold every one of `labels` (`front="resp"`).
    #[must_use]
    pub fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        let of = |series: &str| {
            let rest = series.strip_prefix(name)?;
            let ours = rest.is_empty() || rest.starts_with('{');
            (ours && labels.iter().all(|label| rest.contains(label))).then_some(())
        };
        self.0
            .iter()
            .filter(|(series, _)| of(series).is_some())
            .map(|(_, value)| value)
            .sum()
    }

    /// Every counter of violations that is not 0.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        let bad = self
            .0
            .iter()
            .filter(|(series, value)| series.contains("violation") && **value != 0.0);
        bad.map(|(series, value)| format!("{series} = {value}")).collect()
    }
}

/// Whether `/readyz` says that the process serves.
///
/// # Errors
/// It does not, and why, or it does not answer.
pub async fn ready(address: &str) -> Result<()> {
    let asked = timeout(ANSWER, get(address, "/readyz")).await;
    asked
        .with_context(|| format!("{address}/readyz did not answer within {ANSWER:?}"))?
        .map(drop)
}

async fn fetch(address: &str) -> Result<Metrics> {
    get(address, "/metrics").await.map(|page| Metrics::parse(&page))
}

async fn get(address: &str, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)
        .await
        .with_context(|| format!("failed to connect to {address}"))?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut page = Vec::new();
    stream.take(MAX_PAGE).read_to_end(&mut page).await?;
    let page = String::from_utf8(page).context("the page is not text")?;
    let Some((head, body)) = page.split_once("\r\n\r\n") else {
        bail!("{address}: the answer has no body");
    };
    let status = head.lines().next().unwrap_or_default();
    ensure!(status.contains(" 200 "), "{address}{path}: {status}: {}", body.trim());
    Ok(body.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_summed_by_name_and_label() {
        let page = "# HELP x y\nx{a=\"1\",b=\"2\"} 3\nx{a=\"1\"} 4\nx_total 5\nx 6\nviolation{rule=\"R1\"} 0\n";
        let metrics = Metrics::parse(page);
        assert_eq!(metrics.sum("x", &[]), 13.0);
        assert_eq!(metrics.sum("x", &["a=\"1\""]), 7.0);
        assert_eq!(metrics.sum("x_total", &[]), 5.0);
        assert!(metrics.violations().is_empty());
        assert_eq!(
            Metrics::parse("a_violations_total{rule=\"R4\"} 2").violations().len(),
            1
        );
    }
}
