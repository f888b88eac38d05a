//! What is said about a replay with real bytes.

use crate::cli::size::Size;

/// Arguments of `kvfs bench trace --real`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RealArguments {
    /// With `trace`: on a mount with memory, a small disk and a remote, with bytes that are compared
    #[arg(long, conflicts_with_all = [
        "budget_share", "budget", "plot", "token_size", "load_rate", "compute_rate"
    ])]
    pub(crate) real: bool,
    /// With `trace --real`: the first so many requests
    #[arg(long, value_name = "N", default_value_t = 300, requires = "real")]
    pub(crate) requests: usize,
    /// With `trace --real`: so many at once
    #[arg(long, value_name = "N", default_value_t = 4, requires = "real")]
    pub(crate) clients: usize,
    /// With `trace --real`: of the mount
    #[arg(long, value_name = "SIZE", default_value = "32M", requires = "real")]
    pub(crate) ram: Size,
    /// With `trace --real`: of the mount
    #[arg(long, value_name = "SIZE", default_value = "64M", requires = "real")]
    pub(crate) ssd: Size,
    /// With `trace --real`: the daemon is killed so often
    #[arg(long, value_name = "N", default_value_t = 2, requires = "real")]
    pub(crate) kills: usize,
    /// With `trace --real`: all requests arrive within so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 20.0, requires = "real")]
    pub(crate) span: f64,
    /// With `trace --real`: decides when the daemon is killed
    #[arg(long, value_name = "N", default_value_t = 1, requires = "real")]
    pub(crate) seed: u64,
}

/// A daemon that is killed before it has answered a few requests is not worth the restart.
const REQUESTS_PER_KILL: usize = 4;

impl RealArguments {
    /// Whether they make sense. The error is one line.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.requests == 0 || self.clients == 0 {
            return Err("--requests and --clients are more than 0".to_owned());
        }
        if self.kills * REQUESTS_PER_KILL > self.requests {
            let (kills, requests) = (self.kills, self.requests);
            return Err(format!(
                "--kills {kills}: of {requests} requests each kill takes {REQUESTS_PER_KILL}"
            ));
        }
        if !(self.span >= 0.0 && self.span.is_finite()) {
            return Err(format!("--span {}: seconds are 0 or more", self.span));
        }
        Ok(())
    }
}
