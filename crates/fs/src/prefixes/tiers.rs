//! Which tiers have what an answer promises.

use std::io::ErrorKind;

use super::find::Finder;
use crate::FsError;
use crate::hits::layer_for_all;
use crate::residency::tier_here;
use kvfs_page::{TokenStart, names};
use kvfs_storage::ingest::model::Model;
use kvfs_storage::store::record::InodeId;
use kvfs_storage::tier::counters::Tier;

/// Pages that are looked at for one answer, each perhaps a look at the disk: the others count as those before them. A prompt of
/// 100,000 tokens has some hundred, and an answer takes a millisecond.
const LOOKS_MAX: u64 = 16;

impl Finder<'_> {
    /// How many of the first tokens of a sequence each tier has, by some pages of the layer that stands for all. What is
    /// in no page yet is in a tail, on the disk.
    pub(super) fn tiers_of(
        &self, rules: &Model, sequence: InodeId, tokens: u64,
    ) -> Result<[u64; 3], FsError> {
        let mut in_tiers = [0; 3];
        let Some(layer) = layer_for_all(&rules.manifest) else {
            in_tiers[Tier::Ssd as usize] = tokens;
            return Ok(in_tiers);
        };
        let page_tokens = u64::from(rules.manifest.geometry().page_tokens());
        let step = tokens.div_ceil(page_tokens).div_ceil(LOOKS_MAX).max(1) * page_tokens;
        let mut start = 0;
        while start < tokens {
            let end = tokens.min(start + step);
            let name = names::format_layer(layer);
            let tier = self.tier_of_page(sequence, &name, start)?;
            in_tiers[tier as usize] += end - start;
            start = end;
        }
        Ok(in_tiers)
    }

    fn tier_of_page(&self, sequence: InodeId, layer: &str, start: u64) -> Result<Tier, FsError> {
        let (object, may_be_away) = {
            let state = self.core().state();
            let Some(layer) = state.entry(sequence, layer.as_bytes())? else {
                return Ok(Tier::Ssd);
            };
            let page = names::format_page(TokenStart(start));
            let Some(page) = state.entry(layer.inode, page.as_bytes())? else {
                return Ok(Tier::Ssd);
            };
            let inode = state.inode(page.inode)?;
            let object = inode.file().and_then(|file| state.current_object(page.inode, file));
            let Some(object) = object else { return Ok(Tier::Ssd) };
            let is_encoded = state.metadata.encoded_copy(object)?.is_some();
            (object, !is_encoded && state.metadata.remote_copy(object)?.is_some())
        };
        // The disk may not answer, and others want the state meanwhile.
        let tier = tier_here(self.core(), object);
        let is_away = tier == Tier::Ssd
            && may_be_away
            && self
                .core()
                .store
                .stat_object(object)
                .is_err_and(|error| error.kind() == ErrorKind::NotFound);
        Ok(if is_away { Tier::Remote } else { tier })
    }
}
