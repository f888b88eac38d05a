//! The hot window: the last pages of each layer, which stay in device memory between scans.
//!
//! Every layer has the same number of places, and the page with index `i` goes into place
//! `i % places`. So the window moves by one page at a time, and what leaves it is what the next page
//! overwrites.

use super::CudaError;
use super::driver::{Context, DeviceMemory, Event, Stream};
use super::layout;
use super::ring::{Home, TableMemory};
use super::table::Placed;
use crate::attention::Shape;
use crate::page::{Dtype, Geometry};

/// Less does not pay for its launches.
const PLACES_MIN: usize = 1;

/// A page of the window.
#[derive(Debug, Clone, Copy)]
pub(super) struct HotPage {
    pub(super) start: u64,
    pub(super) inode: u64,
    pub(super) dtype: Dtype,
    /// Where it lies; its place among the tokens of a scan is the scan's to know.
    pub(super) placed: Placed,
}

/// Device memory for the last pages of each layer of a sequence.
#[derive(Debug)]
pub(super) struct HotWindow {
    sequence: u64,
    memory: DeviceMemory,
    place_bytes: usize,
    /// Places of each layer.
    places: usize,
    /// `[layers][places]`
    pages: Vec<Vec<Option<HotPage>>>,
    /// What was brought here has arrived.
    pub(super) copied: Event,
    /// Kernels are done with it.
    pub(super) idle: Event,
    pub(super) table: TableMemory,
}

impl HotWindow {
    /// As much as `bytes` hold, or as there is memory for: half as much each time that there is not.
    /// `None` if it is less than a page of each layer.
    pub(super) fn new(
        context: &Context, geometry: &Geometry, shape: Shape, layers: usize, bytes: u64,
    ) -> Result<Option<Self>, CudaError> {
        let place_bytes = place_bytes(geometry, shape);
        let of_all = place_bytes.saturating_mul(layers.max(1));
        let mut places = usize::try_from(bytes).unwrap_or(usize::MAX) / of_all;
        while places >= PLACES_MIN {
            match DeviceMemory::new(context, "the hot window", places * of_all) {
                Ok(memory) => {
                    return Ok(Some(Self {
                        sequence: u64::MAX,
                        memory,
                        place_bytes,
                        places,
                        pages: vec![vec![None; places]; layers],
                        copied: context.event()?,
                        idle: context.event()?,
                        table: TableMemory::new(context)?,
                    }));
                }
                Err(CudaError::OutOfMemory { .. }) => places /= 2,
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// A scan begins; of another sequence nothing is known.
    pub(super) fn begin(&mut self, sequence: u64) {
        if sequence != self.sequence {
            self.sequence = sequence;
            self.pages.iter_mut().flatten().for_each(|page| *page = None);
        }
    }

    /// The page with an index, if it is that file.
    pub(super) fn page(&self, layer: usize, index: usize, file: (u64, u64)) -> Option<&HotPage> {
        let page = self.pages[layer][index % self.places].as_ref()?;
        ((page.start, page.inode) == file).then_some(page)
    }

    /// Whether a page of so many belongs to the window.
    pub(super) fn is_within(&self, index: usize, pages: usize) -> bool {
        index + self.places >= pages
    }

    /// Where a page goes.
    pub(super) fn home(&self, layer: usize, index: usize) -> Home<'_> {
        let place = layer * self.places + index % self.places;
        Home { memory: &self.memory, at: place * self.place_bytes, bytes: self.place_bytes }
    }

    /// A page is on its way to its place.
    pub(super) fn set(&mut self, layer: usize, index: usize, page: HotPage) {
        let place = index % self.places;
        self.pages[layer][place] = Some(page);
    }

    /// Before pages are brought here: `copies` waits for kernels that read those before them.
    pub(super) fn before_copies(&self, copies: &Stream) -> Result<(), CudaError> {
        copies.wait(&self.idle)
    }
}

/// Room for a page.
pub(super) fn place_bytes(geometry: &Geometry, shape: Shape) -> usize {
    let file = usize::try_from(geometry.file_bytes(geometry.page_tokens()));
    file.unwrap_or(usize::MAX / 2).saturating_add(layout::slack(shape)).next_multiple_of(256)
}
