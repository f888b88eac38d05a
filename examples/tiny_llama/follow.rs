//! A decode process follows the process that computes the prompt: every page of every layer is
//! looked for as soon as it may be there, and is in memory when the last one is.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use kvfs::page::names::{format_layer, format_page};
use kvfs::page::{Layer, TokenStart};
use kvfs::reader::Sequence;

use crate::Result;

/// Between two looks at the ids, which come behind the last page.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Pages that were followed.
#[derive(Debug, Default)]
pub(crate) struct Followed {
    /// From the last change of each page's bytes until they could be read here, in order.
    pub(crate) lags: Vec<Duration>,
}

/// Waits for the K and V of so many tokens, and for their ids.
pub(crate) fn follow(path: &Path, tokens: u64, longest: Duration) -> Result<Followed> {
    let deadline = Instant::now() + longest;
    let left = || deadline.saturating_duration_since(Instant::now());
    let mut sequence = Sequence::open(path)?;
    let page_tokens = u64::from(sequence.manifest().geometry().page_tokens());
    let mut followed = Followed::default();
    let step = usize::try_from(page_tokens)?;
    for start in (0..tokens).step_by(step) {
        let end = tokens.min(start + page_tokens);
        for layer in sequence.layers() {
            if sequence.wait_for(layer, end, left())? < end {
                return Err(format!("layer {layer} did not get past token {start} in time").into());
            }
            read(&sequence, layer, start..end)?;
            followed.lags.extend(lag(path, layer, start));
        }
    }
    while u64::try_from(sequence.token_ids()?.len())? < tokens {
        if left().is_zero() {
            return Err("the ids of the tokens did not come in time".into());
        }
        std::thread::sleep(LOOK_EVERY);
    }
    followed.lags.sort_unstable();
    Ok(followed)
}

/// Has every row in memory.
fn read(sequence: &Sequence, layer: Layer, tokens: std::ops::Range<u64>) -> Result<()> {
    let mut stream = sequence.stream_layers(&[layer], tokens)?;
    while let Some(run) = stream.next_run()? {
        std::hint::black_box(run.blocks());
    }
    Ok(())
}

/// Since the bytes of a page were complete; none for rows that are still in the tail.
fn lag(path: &Path, layer: Layer, start: u64) -> Option<Duration> {
    let page = path.join(format_layer(layer)).join(format_page(TokenStart(start)));
    let written = page.metadata().and_then(|metadata| metadata.modified()).ok()?;
    SystemTime::now().duration_since(written).ok()
}

impl Followed {
    /// The lag that this part of the pages, 0 to 1, stays below.
    pub(crate) fn lag(&self, part: f64) -> Duration {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a place in a list"
        )]
        let index = (self.lags.len() as f64 * part) as usize;
        self.lags.get(index.min(self.lags.len().saturating_sub(1))).copied().unwrap_or_default()
    }
}
