//! How much memory an input makes a target ask for at once.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static LARGEST: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, which remembers the largest request.
struct Watched;

#[global_allocator]
static WATCHED: Watched = Watched;

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are those that are asked for here.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are those that are asked for here.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are those that are asked for here.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: the caller's promises are those that are asked for here.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Begins anew.
pub(crate) fn reset() {
    LARGEST.store(0, Ordering::Relaxed);
}

/// The largest request since.
pub(crate) fn largest() -> usize {
    LARGEST.load(Ordering::Relaxed)
}
