//! The position encoding in K, for tokens that moved.

use std::ffi::c_char;

use super::manifest::Manifest;
use super::memory::Caller;
use super::status::{Failure, Status, guard};
use crate::attention;
use crate::page::Rope;

/// Which two elements of a row turn together.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// `i` and `i + dims / 2` (GPT-NeoX, Llama in Hugging Face's order).
    Halves = 0,
    /// `2i` and `2i + 1` (GPT-J, Llama's original order).
    Interleaved = 1,
}

/// A rotary position encoding. It never changes, so any number of threads may use one.
#[derive(Debug)]
pub struct Rotation(attention::Rotation);

impl Rotation {
    pub(super) fn inner(&self) -> &attention::Rotation {
        &self.0
    }

    fn new(rope: &Rope, head_dim: u32, pairing: u32, first: u32) -> Result<Self, Failure> {
        let pairing = match pairing {
            0 => attention::Pairing::Halves,
            1 => attention::Pairing::Interleaved,
            other => return Err(Failure::argument(format!("pairing {other} is unknown"))),
        };
        if first > head_dim {
            let why = format!("rotation from element {first} of a head_dim of {head_dim}");
            return Err(Failure::argument(why));
        }
        let rotation = attention::Rotation::new(rope, head_dim as usize, pairing)?;
        Ok(Self(rotation.starting_at(first as usize)))
    }
}

/// Creates `*rotation` for the `rope` of a manifest, to be freed with `kvfs_rotation_free`.
/// `pairing` is one of `kvfs_pairing`, which the manifest does not tell; `first` is the first
/// rotated element of a row, other than 0 in latent attention.
///
/// `KVFS_STATUS_ARGUMENT` if the manifest has no `rope`, `KVFS_STATUS_UNSUPPORTED` for a scaling
/// whose frequencies depend on the length of the sequence.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_rotation_from_manifest(
    manifest: *const Manifest, pairing: u32, first: u32, rotation: *mut *mut Rotation,
) -> Status {
    let make = |caller: &Caller| {
        let manifest = caller.handle(manifest, "manifest")?.inner();
        let rope = manifest.fields().rope.as_ref();
        let rope = rope.ok_or_else(|| Failure::argument("the manifest has no rope"))?;
        Rotation::new(rope, manifest.geometry().head_dim(), pairing, first)
    };
    let call = |caller: &Caller| caller.create(rotation, || make(caller));
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// The same for a `rope` object as manifests have it, `{"theta", "scaling", "dims"}`, as UTF-8 of
/// `json_bytes` bytes, and rows of `head_dim` elements.
///
/// `KVFS_STATUS_ARGUMENT` if it is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_rotation_from_json(
    json: *const c_char, json_bytes: usize, head_dim: u32, pairing: u32, first: u32,
    rotation: *mut *mut Rotation,
) -> Status {
    let make = |caller: &Caller| {
        let rope = serde_json::from_slice(caller.slice(json.cast::<u8>(), json_bytes, "json")?);
        let rope = rope.map_err(|error| Failure::argument(format!("rope: {error}")))?;
        Rotation::new(&rope, head_dim, pairing, first)
    };
    let call = |caller: &Caller| caller.create(rotation, || make(caller));
    // SAFETY: the promises of the header.
    unsafe { guard(call) }
}

/// Frees a rotation that no call uses any more. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvfs_rotation_free(rotation: *mut Rotation) {
    let call = |caller: &Caller| caller.take(rotation).map(drop);
    // SAFETY: the promises of the header.
    let _ = unsafe { guard(call) };
}
