//! An open sequence.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::buffer::Buffers;
use super::counters::Counters;
use super::layer_scan::{LayerScan, Rules};
use super::listing::{self, ListedLayer, Listing};
use super::loader::{Loader, Source};
use super::page::{Home, Mapping};
use super::residents::Residents;
use super::stream::Stream;
use super::tail::Tail;
use super::{Counts, ReadError};
use crate::page::{Layer, Manifest, Positions, names};
use crate::sys;
use kvfs_page::reader_report::ATTRIBUTE_C;

/// Between two reports to the mount: a report is a request (20 us).
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// How a sequence is read.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The pages that stay in memory between scans.
    pub residents: Arc<Residents>,
    /// Most memory of one stream for pages that do not stay; at least three pages.
    pub stream_bytes: u64,
    /// How pages are mapped.
    pub mapping: Mapping,
}

impl Default for Settings {
    /// The residents of the process, and 64 MiB: ten pages of 4 MiB on their way, which is what a
    /// disk of 7 GB/s reads while 6 ms pass.
    fn default() -> Self {
        let residents = Residents::of_process();
        Self { residents, stream_bytes: 64 << 20, mapping: Mapping::Shared }
    }
}

/// A sequence of a mount, or of a copy of one. It may be shared among threads, each with a stream
/// of its own.
#[derive(Debug)]
pub struct Sequence {
    pub(super) source: Arc<Source>,
    pub(super) loader: Loader,
    pub(super) layers: Vec<ListedLayer>,
    pub(super) positions: Arc<Positions>,
    /// Of layers whose rows no operation moves.
    plain: Arc<Positions>,
    pub(super) tails: Vec<Tail>,
    pub(super) counters: Counters,
    pub(super) stream_bytes: u64,
    reported: Mutex<(Counts, Instant)>,
}

impl Sequence {
    /// Opens the directory of a sequence and lists it.
    ///
    /// # Errors
    /// [`ReadError::Manifest`] if it is not one; otherwise as [`refresh`](Self::refresh).
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        Self::open_with(path, Settings::default())
    }

    /// The same with other settings.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(path: &Path, settings: Settings) -> Result<Self, ReadError> {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let (manifest, home) = listing::manifest(path)?;
        let geometry = manifest.largest_geometry();
        let page_bytes = geometry.file_bytes(geometry.page_tokens());
        let page_bytes = usize::try_from(page_bytes).unwrap_or(usize::MAX);
        let Listing { layers, positions } = listing::list(path, &manifest)?;
        let source = Arc::new(Source {
            path: path.to_owned(),
            manifest,
            home,
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            residents: settings.residents,
            buffers: Arc::new(Buffers::new(page_bytes)),
            mapping: settings.mapping,
        });
        Ok(Self {
            loader: Loader::start(&source).map_err(ReadError::io(path))?,
            tails: layers.iter().map(|_| Tail::default()).collect(),
            layers,
            positions: Arc::new(positions),
            plain: Arc::default(),
            source,
            counters: Counters::default(),
            stream_bytes: settings.stream_bytes,
            reported: Mutex::new((Counts::default(), Instant::now())),
        })
    }

    /// The model's manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.source.manifest
    }

    /// Lists the sequence anew. Pages that are other files now are let go of; runs that have them
    /// keep the old ones.
    ///
    /// # Errors
    /// [`ReadError::Io`], [`ReadError::Disconnected`], [`ReadError::Refused`] if the last page of a
    /// layer is none, and [`ReadError::Changed`] if a tail was sealed meanwhile: call it again.
    pub fn refresh(&mut self) -> Result<(), ReadError> {
        let Listing { layers, positions } = listing::list(&self.source.path, self.manifest())?;
        for (index, (old, new)) in self.layers.iter().zip(&layers).enumerate() {
            let layer = Layer(u32::try_from(index).unwrap_or(u32::MAX));
            for page in &old.pages {
                if new
                    .pages
                    .binary_search_by_key(&page.start, |page| page.start)
                    .is_ok_and(|index| new.pages[index].inode == page.inode)
                {
                    continue;
                }
                self.source.residents.remove(&self.source.key(layer, page));
            }
        }
        self.layers = layers;
        self.positions = Arc::new(positions);
        Ok(())
    }

    /// Where the rows stand, as it was listed. Everything else here counts rows: that is the same
    /// as long as nobody has removed or moved tokens.
    pub fn positions(&self) -> &Positions {
        &self.positions
    }

    /// The layers that keep K and V.
    pub fn layers(&self) -> Vec<Layer> {
        let layers = (0..self.manifest().geometry().num_layers()).map(Layer);
        layers.filter(|layer| self.keeps_pages(*layer)).collect()
    }

    /// The layers that keep K and V of an encoder's output. They are scanned by themselves, with
    /// [`stream_layers`](Self::stream_layers) from 0 to [`layer_tokens`](Self::layer_tokens), and
    /// attended to without `causal`.
    pub fn cross_layers(&self) -> Vec<Layer> {
        let layers = (0..self.manifest().geometry().num_layers()).map(Layer);
        layers.filter(|layer| listing::is_cross(self.manifest(), *layer)).collect()
    }

    pub(super) fn positions_of(&self, layer: Layer) -> &Arc<Positions> {
        if listing::is_cross(self.manifest(), layer) { &self.plain } else { &self.positions }
    }

    fn keeps_pages(&self, layer: Layer) -> bool {
        listing::keeps_pages(self.manifest(), layer)
    }

    /// Tokens of a layer from the first to the last one that has rows, as it was listed. There may
    /// be holes; a scan says where.
    ///
    /// # Errors
    /// [`ReadError::Arguments`] if the layer keeps no pages.
    pub fn layer_tokens(&self, layer: Layer) -> Result<u64, ReadError> {
        if !self.keeps_pages(layer) && !listing::is_cross(self.manifest(), layer) {
            let why = format!("layer {layer} does not exist or keeps no pages");
            return Err(ReadError::Arguments(why));
        }
        Ok(self.layers[layer.0 as usize].end)
    }

    /// The ids in `tokens`; none if there is no such file. A last one that is not whole is left
    /// out.
    ///
    /// # Errors
    /// [`ReadError::Io`] and [`ReadError::Disconnected`].
    pub fn token_ids(&self) -> Result<Vec<u32>, ReadError> {
        let path = self.tokens_path();
        let bytes = match sys::read_no_follow(&path, u64::MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            outcome => outcome.map_err(ReadError::io(&path))?,
        };
        Ok(bytes.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id)).collect())
    }

    /// Tokens that every layer has rows of, and that `tokens` has ids of if there is such a file.
    ///
    /// # Errors
    /// [`ReadError::Io`] and [`ReadError::Disconnected`].
    pub fn valid_tokens(&self) -> Result<u64, ReadError> {
        listing::valid_tokens(&self.source.path, self.manifest(), &self.layers)
    }

    /// Scans all layers. The pages are those with rows `tokens`, the first of them from its
    /// beginning; holes are left out.
    ///
    /// # Errors
    /// [`ReadError::Missing`] if a layer has not all of the tokens. Of a layer with a window only what
    /// the last token sees must be there.
    pub fn stream(&self, tokens: Range<u64>) -> Result<Stream<'_>, ReadError> {
        self.stream_layers(&self.layers(), tokens)
    }

    /// Scans some layers, in this order.
    ///
    /// # Errors
    /// As [`stream`](Self::stream), and [`ReadError::Arguments`] for a layer without pages.
    pub fn stream_layers(
        &self, layers: &[Layer], tokens: Range<u64>,
    ) -> Result<Stream<'_>, ReadError> {
        let scan = |layer: &Layer| {
            self.layer_tokens(*layer)?;
            let rules = Rules::new(*layer, self.manifest(), self.positions_of(*layer), tokens.end);
            LayerScan::new(*layer, &self.layers[layer.0 as usize], &tokens, &rules)
        };
        let scans = layers.iter().map(scan).collect::<Result<_, _>>()?;
        Ok(Stream::new(self, scans, tokens))
    }

    /// What was read so far.
    pub fn counts(&self) -> Counts {
        self.counters.counts()
    }

    /// Tells the mount what was read since the last report. Streams do so by themselves once a
    /// second, and dropping the sequence does; a failure of those is only logged.
    ///
    /// # Errors
    /// [`ReadError::Io`] and [`ReadError::Disconnected`].
    pub fn report(&self) -> Result<(), ReadError> {
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = self.counts();
        let added = counts.since(&reported.0);
        if self.source.home == Home::Directory || added == Counts::default() {
            return Ok(());
        }
        // Also if it fails: whoever may not report need not try at each scan.
        reported.1 = Instant::now();
        let path = &self.source.path;
        sys::set_extended_attribute(path, ATTRIBUTE_C, added.to_string().as_bytes())
            .map_err(ReadError::io(path))?;
        reported.0 = counts;
        Ok(())
    }

    pub(super) fn report_if_due(&self) {
        let is_due = |(_, at): &(Counts, Instant)| at.elapsed() >= REPORT_INTERVAL;
        // Whoever has it is reporting.
        if self.reported.try_lock().is_ok_and(|reported| is_due(&reported)) {
            self.report_or_log();
        }
    }

    fn report_or_log(&self) {
        if let Err(error) = self.report() {
            log::debug!("what was read is not reported: {error}");
        }
    }

    fn tokens_path(&self) -> PathBuf {
        self.source.path.join(names::TOKENS)
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.report_or_log();
        // Or a page that is being loaded would stay.
        self.loader.stop();
        self.source.residents.forget(self.source.number);
    }
}
