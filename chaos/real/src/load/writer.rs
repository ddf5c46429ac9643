//! A writer that is never patient: one try lasts 150 ms, then the next member is asked. What it measures is the group, not
//! the client's back-off.

use super::metadata::POOL_PREFIX;
use crate::record::Record;
use anyhow::{Result, anyhow};
use kvpool_client::{Client, JoinToken, Timing, Trust};
use kvpool_proto::v1::ConfigurePoolRequest;
use kvpool_proto::v1::cluster_client::ClusterClient;
use kvpool_state::MAX_FACTOR;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

/// How long one member is waited for; the same as in the figures of etcd that this is compared with.
const TRY: Duration = Duration::from_millis(150);
const PAUSE: Duration = Duration::from_millis(5);

/// One writer with connections of its own.
pub struct Writer {
    pub number: u32,
    pub endpoints: Vec<String>,
    pub token: JoinToken,
    pub timing: Timing,
    /// For request ids.
    pub ids: Client,
    pub record: Arc<Record>,
    pub stop: CancellationToken,
}

impl Writer {
    /// Writes until it is told to stop; every acknowledged write counts in [`Record::writes`].
    ///
    /// # Errors
    /// An address makes no sense, or a write was refused by the state.
    pub async fn run(self) -> Result<()> {
        let mut members = Vec::new();
        for address in &self.endpoints {
            let channel = Trust::Plain
                .endpoint(address, self.timing)
                .map_err(|e| anyhow!(e))?
                .connect_lazy();
            members.push(ClusterClient::new(channel));
        }
        let (mut turn, mut value) = (0_usize, 0_u32);
        while !self.stop.is_cancelled() {
            value = value % MAX_FACTOR + 1;
            let write = ConfigurePoolRequest {
                request_id: Some(self.ids.request_id()),
                pool: format!("{POOL_PREFIX}{}", self.number),
                factor: value,
            };
            while !self.stop.is_cancelled() {
                let at = turn % members.len().max(1);
                if self.attempt(members.get_mut(at), &write).await? {
                    break;
                }
                turn += 1;
            }
            sleep(PAUSE).await;
        }
        Ok(())
    }

    async fn attempt(&self, member: Option<&mut ClusterClient<Channel>>, write: &ConfigurePoolRequest) -> Result<bool> {
        let Some(member) = member else { return Ok(false) };
        let mut request = tonic::Request::new(write.clone());
        self.token.attach(request.metadata_mut());
        match timeout(TRY, member.configure_pool(request)).await {
            Ok(Ok(answer)) if answer.get_ref().refusal == 0 => {
                self.record.writes.success();
                Ok(true)
            }
            Ok(Ok(answer)) => Err(anyhow!("a write was refused: {}", answer.get_ref().message)),
            Ok(Err(_)) => {
                // A dead member refuses at once; without a pause this would be a busy loop.
                sleep(PAUSE).await;
                Ok(false)
            }
            Err(_) => Ok(false),
        }
    }
}
