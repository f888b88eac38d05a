//! What rounding to blocks makes of rows, without a new version of their page: for those who want to know how
//! much it would change, or whether it was what changed them.

use kvfs_page::Dtype;

use super::filter::Float;
use super::quantise::{BLOCK_VALUES, quantise};
use super::{Quantisation, Unsuitable};

/// Replaces rows of `row_elements` values in `dtype` by what a page that was rounded has in their place.
///
/// # Errors
/// Why a page with such rows keeps its values; some of `rows` may be replaced by then.
///
/// # Panics
/// If `rows` are no whole rows.
pub fn round_rows(
    dtype: Dtype, row_elements: u32, quantisation: Quantisation, rows: &mut [u8],
) -> Result<(), Unsuitable> {
    let float = Float::of(dtype).ok_or(Unsuitable::Dtype)?;
    if row_elements == 0 || !row_elements.is_multiple_of(quantisation.dtype().block_elements()) {
        return Err(Unsuitable::RowLength);
    }
    let values = rows.len() / float.bytes();
    assert!(
        values * float.bytes() == rows.len() && values.is_multiple_of(row_elements as usize),
        "{} bytes are no whole {dtype} rows of {row_elements}",
        rows.len()
    );
    let block_bytes = quantisation.dtype().block_bytes() as usize;
    let mut blocks = vec![0; values / BLOCK_VALUES * block_bytes];
    quantise(quantisation, float, rows, &mut blocks).map_err(|_| Unsuitable::NotFinite)
}
