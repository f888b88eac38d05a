//! Many pages at once, into memory of the caller.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use kvfs_page::{Geometry, Layout};
use pyo3::prelude::*;

use crate::errors::Failure;
use crate::page::{PAYLOAD_BYTE, Page};
use crate::tensor::Tensor;
use crate::workers::each;

/// One page's share of the work.
struct Job<'a> {
    page: &'a Page,
    k: &'a mut [u8],
    v: Option<&'a mut [u8]>,
    side: Option<&'a mut [u8]>,
}

/// Reads pages, each into its place of `k`, `v` and `side`: arrays `[pages, ...]` whose other dimensions are those of
/// a page, contiguous and writable (NumPy, torch on the processor). All pages must have as many tokens as the arrays,
/// and be of layers that keep the same. What the arrays hold after an exception is undefined.
#[pyfunction]
#[pyo3(signature = (pages, k, v = None, side = None))]
pub(crate) fn read_pages(
    py: Python<'_>, pages: Vec<Bound<'_, Page>>, k: &Bound<'_, PyAny>,
    v: Option<&Bound<'_, PyAny>>, side: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let pages: Vec<&Page> = pages.iter().map(Bound::get).collect();
    let Some(first) = pages.first() else { return Ok(()) };
    let geometry = *first.place().geometry();
    if pages.iter().any(|page| *page.place().geometry() != geometry) {
        let why = "the pages are of different models, or of layers that keep different rows";
        return Err(Failure::argument(why).into());
    }
    if let Some(tail) = pages.iter().find(|page| page.is_tail()) {
        let path = tail.file().display();
        let why = format!("{path}: is a tail, whose rows are in memory already: take its k and v");
        return Err(Failure::argument(why).into());
    }
    let mut k = Tensor::take(k, "k")?;
    let mut v = v.map(|v| Tensor::take(v, "v")).transpose()?;
    let tokens = tokens_of(&k, &geometry, pages.len(), false)?;
    if let Some(v) = &v
        && tokens_of(v, &geometry, pages.len(), true)? != tokens
    {
        return Err(Failure::argument("k and v have not as many tokens").into());
    }
    if v.is_some() != (geometry.v_head_dim() > 0) {
        return Err(Failure::argument("v is needed if and only if the model keeps V").into());
    }
    let mut side = side.map(|side| Tensor::take(side, "side")).transpose()?;
    check_side(side.as_ref(), &geometry, (pages.len(), tokens))?;
    let side_bytes = usize::try_from(geometry.side_bytes(tokens)).unwrap_or(usize::MAX);
    let k_bytes = usize::try_from(geometry.k_bytes(tokens)).unwrap_or(usize::MAX);
    let v_bytes = usize::try_from(geometry.v_bytes(tokens)).unwrap_or(usize::MAX);
    let k = k.bytes_mut()?.chunks_exact_mut(k_bytes);
    let mut v = v.as_mut().map(Tensor::bytes_mut).transpose()?.map(|v| v.chunks_exact_mut(v_bytes));
    let side = side.as_mut().map(Tensor::bytes_mut).transpose()?;
    let mut side = side.map(|side| side.chunks_exact_mut(side_bytes));
    let jobs = pages.into_iter().zip(k).map(|(page, k)| Job {
        page,
        k,
        v: v.as_mut().and_then(Iterator::next),
        side: side.as_mut().and_then(Iterator::next),
    });
    let jobs: Vec<Job<'_>> = jobs.collect();
    Ok(py.detach(|| read_all(jobs, tokens))?)
}

/// Side rows are asked for if and only if the pages have any: whoever forgets them would go on without.
fn check_side(
    side: Option<&Tensor>, geometry: &Geometry, (pages, tokens): (usize, u32),
) -> Result<(), Failure> {
    let row_bytes = geometry.side_row_bytes();
    let Some(side) = side else {
        if row_bytes == 0 {
            return Ok(());
        }
        return Err(Failure::argument(format!(
            "side is missing: these pages have {row_bytes} bytes beside K and V of each token"
        )));
    };
    if row_bytes == 0 {
        return Err(Failure::argument(
            "side is given, and these pages have nothing beside K and V",
        ));
    }
    let fits = match side.shape[..] {
        [found, rows, elements] => {
            let bytes = elements as u64 * side.element.bytes() as u64;
            (found, rows as u64, bytes) == (pages, u64::from(tokens), row_bytes)
        }
        _ => false,
    };
    if !fits || !side.is_contiguous_from(0) {
        return Err(Failure::argument(format!(
            "side has shape {:?} of {}: contiguous [{pages}, {tokens}, elements] with {row_bytes} bytes in a row \
             is needed",
            side.shape,
            side.element.name()
        )));
    }
    Ok(())
}

/// How many tokens the arrays have room for in each page.
fn tokens_of(
    tensor: &Tensor, geometry: &Geometry, pages: usize, is_v: bool,
) -> Result<u32, Failure> {
    let what = &tensor.what;
    let found: Vec<u64> = tensor.shape.iter().map(|length| *length as u64).collect();
    let tokens = match (geometry.layout(), &found[..]) {
        (Layout::Hnd, [_, _, tokens, _]) | (Layout::Nhd, [_, tokens, _, _]) => *tokens,
        _ => 0,
    };
    let tokens =
        u32::try_from(tokens).ok().filter(|tokens| (1..=geometry.page_tokens()).contains(tokens));
    let page = |tokens| if is_v { geometry.v_shape(tokens) } else { geometry.k_shape(tokens) };
    let fits = tokens.is_some_and(|tokens| found[0] == pages as u64 && found[1..] == page(tokens));
    let Some(tokens) = tokens.filter(|_| fits) else {
        let full = page(geometry.page_tokens());
        return Err(Failure::argument(format!(
            "{what} has shape {found:?}: [{pages}, {}, {}, {}] is needed for full pages",
            full[0], full[1], full[2]
        )));
    };
    if !tensor.element.stands_for(geometry.dtype()) || !tensor.is_contiguous_from(0) {
        let (name, wanted) = (tensor.element.name(), geometry.dtype());
        return Err(Failure::argument(format!("{what} is {name}: contiguous {wanted} is needed")));
    }
    Ok(tokens)
}

fn read_all(jobs: Vec<Job<'_>>, tokens: u32) -> Result<(), Failure> {
    let has_failed = AtomicBool::new(false);
    let outcomes = each(jobs, 1, |job| {
        // Nobody needs the others any more.
        if has_failed.load(Ordering::Relaxed) {
            return Ok(());
        }
        let outcome = job.run(tokens);
        has_failed.fetch_or(outcome.is_err(), Ordering::Relaxed);
        outcome
    });
    outcomes.into_iter().collect()
}

impl Job<'_> {
    fn run(self, tokens: u32) -> Result<(), Failure> {
        let path = self.page.file();
        let failed = Failure::io(path);
        let file = File::open(path).map_err(&failed)?;
        let length = file.metadata().map_err(&failed)?.len();
        let wanted = self.page.place().geometry().file_bytes(tokens);
        if length != wanted {
            return Err(Failure::argument(format!(
                "{}: has {length} bytes, {tokens} tokens are {wanted}: the last page may be shorter",
                path.display()
            )));
        }
        let mut at = PAYLOAD_BYTE as u64;
        for tensor in [Some(self.k), self.v, self.side].into_iter().flatten() {
            file.read_exact_at(tensor, at).map_err(&failed)?;
            at += tensor.len() as u64;
        }
        Ok(())
    }
}
