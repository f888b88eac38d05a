//! The staging ring: pinned host buffers between pages and the device.
//!
//! In the literature ring attention passes K and V around among devices; here the ring is between
//! host and device. A slot is a pinned buffer, device memory of the same size, and two events:
//!
//! ```text
//! host      wait for the slot's last upload, copy pages into the pinned buffer
//! copies    wait for `consumed`, upload, record `copied`
//! computes  wait for `copied`, attend, record `consumed`
//! ```
//!
//! Slots are filled and attended to in order, so two counters say which are free. The copy stream
//! runs ahead over all layers as far as there are slots, since K and V do not depend on the queries;
//! it waits for kernels on the device, never for the host to see that they are done.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::CudaError;
use super::driver::{Context, DeviceMemory, Event, Pinned, Registered, Stream};
use super::layout::{self, Layout};
use super::table::{Placed, Table};
use crate::attention::pool::Pool;
use crate::attention::{KvBlock, Shape};
use crate::page::Dtype;

/// Slots of a ring: one is attended to, one is uploaded, one is filled, and one evens out what they
/// take.
pub(super) const SLOTS: usize = 4;

/// What a thread copies at a time.
const CHUNK_BYTES: usize = 512 << 10;

/// Room for a table of a hundred pages, before a selection asks for more.
const TABLE_BYTES: usize = 16 << 10;

/// A table in device memory, and where it comes from.
#[derive(Debug)]
pub(super) struct TableMemory {
    pinned: Pinned,
    memory: DeviceMemory,
}

impl TableMemory {
    pub(super) fn new(context: &Context) -> Result<Self, CudaError> {
        Self::with_bytes(context, TABLE_BYTES)
    }

    fn with_bytes(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        Ok(Self {
            pinned: Pinned::new(context, "tables", bytes)?,
            memory: DeviceMemory::new(context, "tables", bytes)?,
        })
    }

    /// Brings a table to the device, in the order of the stream whose kernels read it.
    pub(super) fn upload(
        &mut self, context: &Context, stream: &Stream, table: &Table,
    ) -> Result<&DeviceMemory, CudaError> {
        if table.bytes() > self.memory.bytes() {
            // Kernels may still read the old one.
            stream.synchronize()?;
            *self = Self::with_bytes(context, table.bytes().next_power_of_two())?;
        }
        table.write(self.pinned.bytes_mut()?);
        stream.upload(&self.pinned, 0..table.bytes(), &self.memory, 0)?;
        Ok(&self.memory)
    }
}

#[derive(Debug)]
struct Slot {
    pinned: Pinned,
    memory: DeviceMemory,
    table: TableMemory,
    /// The upload is done.
    copied: Event,
    /// The kernels are done with it.
    consumed: Event,
}

/// Tokens of a block that are to be brought to the device.
#[derive(Debug, Clone)]
pub(super) struct Wanted<'a> {
    pub(super) block: KvBlock<'a>,
    pub(super) tokens: Range<usize>,
    /// Of the block's first token among those of all blocks.
    pub(super) start: usize,
    /// Which copy of the queries.
    pub(super) queries: u32,
    /// Where they are to stay, instead of in the slot.
    pub(super) home: Option<Home<'a>>,
}

/// A place outside of the ring.
#[derive(Debug, Clone, Copy)]
pub(super) struct Home<'a> {
    pub(super) memory: &'a DeviceMemory,
    pub(super) at: usize,
    pub(super) bytes: usize,
}

/// A slot's content.
#[derive(Debug)]
pub(super) struct Staged {
    pub(super) dtype: Dtype,
    pub(super) blocks: Vec<Placed>,
    /// What the caller knows it by.
    pub(super) layer: usize,
}

/// The slots.
#[derive(Debug)]
pub(super) struct Ring {
    context: Context,
    slots: Vec<Slot>,
    slot_bytes: usize,
    pool: Pool,
    /// Slots that were filled so far.
    filled: usize,
    staged: VecDeque<Staged>,
}

impl Ring {
    /// Some slots of so many bytes, which `threads` threads fill.
    pub(super) fn new(
        context: &Context, slots: usize, slot_bytes: usize, threads: usize,
    ) -> Result<Self, CudaError> {
        let slot = |_| {
            Ok(Slot {
                pinned: Pinned::new(context, "the staging ring", slot_bytes)?,
                memory: DeviceMemory::new(context, "the staging ring", slot_bytes)?,
                table: TableMemory::new(context)?,
                copied: context.event()?,
                consumed: context.event()?,
            })
        };
        let pool = Pool::new(threads)
            .map_err(|error| CudaError::Unavailable(format!("{threads} threads ({error})")))?;
        let slots = (0..slots).map(slot).collect::<Result<_, CudaError>>()?;
        let (context, staged) = (context.clone(), VecDeque::new());
        Ok(Self { context, slots, slot_bytes, pool, filled: 0, staged })
    }

    /// Bytes of a slot.
    pub(super) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Whether a slot is free.
    pub(super) fn has_room(&self) -> bool {
        self.staged.len() < self.slots.len()
    }

    /// The layer of what comes next.
    pub(super) fn front(&self) -> Option<usize> {
        self.staged.front().map(|staged| staged.layer)
    }

    /// Where the blocks are that were staged last.
    pub(super) fn last_staged(&self) -> &[Placed] {
        self.staged.back().map_or(&[], |staged| &staged.blocks)
    }

    /// What is in the oldest slot.
    pub(super) fn front_blocks(&self) -> Option<(Dtype, &[Placed])> {
        self.staged.front().map(|staged| (staged.dtype, &staged.blocks[..]))
    }

    /// Lets go of what was staged and not attended to. Uploads go on; later ones come after them.
    pub(super) fn clear(&mut self) {
        self.staged.clear();
    }

    /// Fills a slot with the first of some blocks, as many as it holds, and starts its upload.
    /// Returns how many, and how many tokens of the next one, which is larger than a slot.
    pub(super) fn stage(
        &mut self, copies: &Stream, shape: Shape, wanted: &[Wanted<'_>], layer: usize,
    ) -> Result<(usize, usize), CudaError> {
        assert!(self.has_room(), "the caller has looked");
        let Some(first) = wanted.first() else { return Ok((0, 0)) };
        let dtype = first.block.dtype;
        let (layouts, cut) = fit(wanted, shape, self.slot_bytes)?;
        let index = self.filled % self.slots.len();
        let slot = &mut self.slots[index];
        fill(&self.pool, slot.pinned.bytes_mut()?, &layouts);
        copies.wait(&slot.consumed)?;
        upload(copies, slot, wanted, &layouts)?;
        copies.record(&slot.copied)?;
        let mut blocks = Vec::with_capacity(layouts.len());
        for ((at, tokens, layout), wanted) in layouts.iter().zip(wanted) {
            let start = wanted.home.map_or(slot.memory.address() + *at as u64, |home| {
                home.memory.address() + home.at as u64
            });
            blocks.push(placed(wanted, tokens, layout, start));
        }
        let taken = if cut > 0 { 0 } else { layouts.len() };
        self.filled += 1;
        self.staged.push_back(Staged { dtype, blocks, layer });
        Ok((taken, cut))
    }

    /// Starts the upload of one block from memory that the device reads by itself.
    pub(super) fn stage_registered<T: AsRef<[u8]>>(
        &mut self, copies: &Stream, shape: Shape, wanted: &Wanted<'_>, from: &Registered<T>,
        layer: usize,
    ) -> Result<(), CudaError> {
        assert!(self.has_room(), "the caller has looked");
        let layout = layout::layout(&wanted.block, shape, wanted.tokens.clone())?;
        let slot = &self.slots[self.filled % self.slots.len()];
        let in_slot = Home { memory: &slot.memory, at: 0, bytes: self.slot_bytes };
        let home = wanted.home.unwrap_or(in_slot);
        if layout.bytes > home.bytes {
            let why = "a page that is larger than a slot of the ring";
            return Err(CudaError::Unsupported(why.to_owned()));
        }
        copies.wait(&slot.consumed)?;
        let file: &[u8] = (**from.owner()).as_ref();
        for piece in &layout.pieces {
            // A piece is a part of the file; if it were not, the upload would panic.
            let start = piece.source.as_ptr().addr().wrapping_sub(file.as_ptr().addr());
            let range = start..start.saturating_add(piece.source.len());
            copies.upload(from, range, home.memory, home.at + piece.at)?;
        }
        copies.record(&slot.copied)?;
        let start = home.memory.address() + home.at as u64;
        let blocks = vec![placed(wanted, &wanted.tokens, &layout, start)];
        self.filled += 1;
        self.staged.push_back(Staged { dtype: wanted.block.dtype, blocks, layer });
        Ok(())
    }

    /// Makes a stream wait for the oldest slot, and brings the table of what reads it to the device.
    ///
    /// # Panics
    /// If nothing is staged.
    pub(super) fn open(
        &mut self, computes: &Stream, table: &Table,
    ) -> Result<&DeviceMemory, CudaError> {
        let index = self.oldest();
        let slot = &mut self.slots[index];
        computes.wait(&slot.copied)?;
        slot.table.upload(&self.context, computes, table)
    }

    /// The oldest slot is free when the stream has done what is in it now.
    pub(super) fn close(&mut self, computes: &Stream) -> Result<(), CudaError> {
        let index = self.oldest();
        self.staged.pop_front();
        computes.record(&self.slots[index].consumed)
    }

    fn oldest(&self) -> usize {
        assert!(!self.staged.is_empty(), "the caller has looked");
        (self.filled - self.staged.len()) % self.slots.len()
    }
}

/// A place in the slot, tokens, and what goes there.
pub(super) type Fitted<'a> = (usize, Range<usize>, Layout<'a>);

/// The first blocks of one dtype that fit into a slot; if not even the first one does, some of its
/// tokens, and how many.
fn fit<'a>(
    wanted: &[Wanted<'a>], shape: Shape, slot_bytes: usize,
) -> Result<(Vec<Fitted<'a>>, usize), CudaError> {
    let mut fitted: Vec<Fitted<'a>> = Vec::new();
    let mut at = 0;
    for next in wanted {
        if next.block.dtype != wanted[0].block.dtype {
            break;
        }
        let layout = layout::layout(&next.block, shape, next.tokens.clone())?;
        if layout.bytes > slot_bytes - at {
            break;
        }
        let bytes = layout.bytes.next_multiple_of(256);
        fitted.push((at, next.tokens.clone(), layout));
        at = (at + bytes).min(slot_bytes);
    }
    if !fitted.is_empty() {
        return Ok((fitted, 0));
    }
    let first = &wanted[0];
    let room = slot_bytes.saturating_sub(layout::slack(shape));
    let count = room / layout::token_bytes(&first.block, shape).max(1);
    if count == 0 {
        return Err(CudaError::Unsupported(format!("a token of more than {slot_bytes} bytes")));
    }
    let tokens = first.tokens.start..first.tokens.end.min(first.tokens.start + count);
    let layout = layout::layout(&first.block, shape, tokens.clone())?;
    Ok((vec![(0, tokens, layout)], count))
}

/// Copies the pieces into a slot's buffer.
pub(super) fn fill(pool: &Pool, mut buffer: &mut [u8], layouts: &[Fitted<'_>]) {
    let mut chunks = Vec::new();
    let mut at = 0;
    for (start, _, layout) in layouts {
        for piece in &layout.pieces {
            let (_, rest) = buffer.split_at_mut(start + piece.at - at);
            let (to, rest) = rest.split_at_mut(piece.source.len());
            at = start + piece.at + piece.source.len();
            buffer = rest;
            chunks.extend(to.chunks_mut(CHUNK_BYTES).zip(piece.source.chunks(CHUNK_BYTES)));
        }
    }
    let chunks = Mutex::new(chunks.into_iter());
    pool.run(&|_| {
        loop {
            let next = chunks.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((to, from)) = next else { return };
            to.copy_from_slice(from);
        }
    });
}

/// Uploads what was filled: blocks that stay in the slot together, others to where they belong.
fn upload(
    copies: &Stream, slot: &Slot, wanted: &[Wanted<'_>], layouts: &[Fitted<'_>],
) -> Result<(), CudaError> {
    let mut together: Option<Range<usize>> = None;
    for ((at, _, layout), wanted) in layouts.iter().zip(wanted) {
        let range = *at..at + layout.bytes;
        let Some(home) = wanted.home else {
            together = Some(together.map_or(*at, |range| range.start)..range.end);
            continue;
        };
        if let Some(range) = together.take() {
            copies.upload(&slot.pinned, range.clone(), &slot.memory, range.start)?;
        }
        assert!(layout.bytes <= home.bytes, "a place holds a page");
        copies.upload(&slot.pinned, range, home.memory, home.at)?;
    }
    let Some(range) = together else { return Ok(()) };
    copies.upload(&slot.pinned, range.clone(), &slot.memory, range.start)
}

fn placed(wanted: &Wanted<'_>, tokens: &Range<usize>, layout: &Layout<'_>, start: u64) -> Placed {
    Placed {
        k: start + layout.k_at as u64,
        v: start + layout.v_at as u64,
        k_strides: layout.k_strides,
        v_strides: layout.v_strides,
        tokens: tokens.len(),
        first_position: wanted.block.first_position + tokens.start as u64,
        start: wanted.start + tokens.start,
        queries: wanted.queries,
    }
}
