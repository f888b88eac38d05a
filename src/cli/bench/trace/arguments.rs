//! What is said about a replay.

use std::path::PathBuf;

use super::real::RealArguments;
use crate::cli::size::Size;

/// Arguments of `kvfs bench trace`.
#[derive(Clone, Debug, clap::Args)]
pub struct TraceArguments {
    /// With `trace`: requests in the Mooncake format, JSON lines, also compressed (.gz)
    #[arg(value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// With `trace`: room for so many per cent of the different blocks
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', default_value = "1,2,5,10,20,40")]
    pub(crate) budget_share: Vec<f64>,
    /// With `trace`: room for so many bytes
    #[arg(long, value_name = "SIZE", conflicts_with = "budget_share")]
    pub(crate) budget: Option<Size>,
    /// With `trace`: what hints are worth to the policy of the tiers (see `kvfs hint`)
    #[arg(long, conflicts_with_all = ["plot", "json", "markdown"])]
    pub(crate) hints: bool,
    /// With `trace`: draw the hits against the room
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    /// With `trace`: how exact `kvfs what-if` would have been, instead of other policies
    #[arg(long, conflicts_with_all = ["plot", "hints", "json", "markdown"])]
    pub(crate) what_if: bool,
    /// With `trace`: bytes that the cache of a token takes
    #[arg(long, value_name = "SIZE", default_value = "128K")]
    pub(crate) token_size: Size,
    /// With `trace`: bytes that are loaded in a second
    #[arg(long, value_name = "SIZE", default_value = "2G")]
    pub(crate) load_rate: Size,
    /// With `trace`: tokens of a prompt that are computed in a second
    #[arg(long, value_name = "TOKENS", default_value_t = 5000.0)]
    pub(crate) compute_rate: f64,
    /// A replay with real bytes.
    #[command(flatten)]
    pub(crate) real: RealArguments,
}

/// Tokens of a block.
pub(super) const BLOCK_TOKENS: u64 = 512;

impl TraceArguments {
    /// Bytes of a block.
    pub(super) fn block_bytes(&self) -> u64 {
        self.token_size.0.saturating_mul(BLOCK_TOKENS)
    }

    /// The rooms to replay in: per cent of the different blocks, and blocks.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "shares of a number of blocks, checked to be positive"
    )]
    pub(super) fn rooms(&self, distinct: usize) -> Result<Vec<(f64, usize)>, String> {
        let is_rate = self.compute_rate > 0.0 && self.compute_rate.is_finite();
        if self.token_size.0 == 0 || self.load_rate.0 == 0 || !is_rate {
            return Err("--token-size, --load-rate and --compute-rate are more than 0".to_owned());
        }
        if let Some(Size(bytes)) = self.budget {
            let blocks = usize::try_from(bytes / self.block_bytes()).unwrap_or(usize::MAX);
            if blocks == 0 {
                let block = self.block_bytes();
                return Err(format!("--budget has room for no block: one takes {block} bytes"));
            }
            return Ok(vec![(100.0 * blocks as f64 / distinct as f64, blocks)]);
        }
        let room = |share: &f64| {
            if !(*share > 0.0 && *share <= 100.0) {
                return Err(format!("--budget-share {share}: a share is more than 0, at most 100"));
            }
            Ok((*share, ((distinct as f64 * share / 100.0) as usize).max(1)))
        };
        self.budget_share.iter().map(room).collect()
    }
}
