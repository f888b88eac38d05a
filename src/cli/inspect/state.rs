//! The state of a recurrent layer: what its header says, and whether its bytes are what a manifest and its
//! place ask for.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::Value;

use super::manifest_above;
use super::page::layer_of;
use crate::cli::summary::Summary;
use crate::page::{StatePlace, TokenStart, VerifyError};

/// Explains a file that has the name of a state.
pub(super) fn inspect(
    path: &Path, file_bytes: u64, row: TokenStart, summary: &mut Summary,
) -> io::Result<()> {
    summary.add("kind", "recurrent state");
    summary.add("tokens", row.0);
    let Some(layer) = layer_of(path) else { return Ok(()) };
    summary.add("layer", layer.0);
    let Some((manifest_path, manifest)) = manifest_above(path) else {
        summary.add("note", "no manifest.json above: not verified");
        return Ok(());
    };
    summary.add("manifest", manifest_path.display().to_string());
    if !manifest.describes_states() {
        summary.add("note", "the manifest does not say what states consist of: not verified");
        return Ok(());
    }
    let place = match StatePlace::new(&manifest, layer, row) {
        Ok(place) => place,
        Err(error) => {
            summary.add("refused", error.to_string());
            return Ok(());
        }
    };
    let file = File::open(path)?;
    let mut read_at = |offset, buffer: &mut [u8]| file.read_at(buffer, offset);
    match place.verify(&mut read_at, file_bytes) {
        Ok(verified) => {
            let tensors = place.shape().state.iter().map(|tensor| {
                Value::from(format!("{} {} {:?}", tensor.name, tensor.dtype, tensor.shape))
            });
            summary.add("tensors", tensors.collect::<Vec<_>>());
            summary.add("prefix", verified.header.prefix.to_string());
            summary.add("checksum", verified.digest.page.to_string());
            let declared = verified.header.checksum.is_some();
            summary.add("verified", if declared { "declared checksum matches" } else { "shape" });
        }
        Err(VerifyError::Io(error)) => return Err(error),
        Err(VerifyError::Page(error)) => summary.add("refused", error.to_string()),
    }
    Ok(())
}
