//! Bytes of a sealed object.
//!
//! ```text
//! header   "kvfsseal", version (u32), key id (u64), salt (32), commitment (32)
//! frames   AES-256-GCM-SIV of 256 KiB each, the last of what is left, perhaps nothing; tag (16)
//! ```
//!
//! Numbers are little endian. Every object has a key of its own: BLAKE3, keyed with the subkey for
//! contents, of the header up to the salt and the object's name. More output of the same hash is the
//! commitment: a sealed object opens under one key, and what was sealed under one name does not open
//! under another. The nonce of a frame is its number and whether it is the last, so frames that
//! are swapped, repeated, left out or cut off are noticed (the STREAM construction). Nobody
//! relies on a salt that is random: with a synthetic IV its repetition tells only whether the same
//! bytes were sealed twice under the same name.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aes_gcm_siv::aead::AeadInOut;
use aes_gcm_siv::aead::inout::InOutBuf;
use aes_gcm_siv::{Aes256GcmSiv, KeyInit, Nonce, Tag};

use super::keys::{KeyId, Subkeys, random};
use crate::transfer::{ReadAt, Sink, Source, WriteAt};

const MAGIC: [u8; 8] = *b"kvfsseal";
const VERSION: u32 = 1;
const SALT_BYTES: usize = 32;
const COMMITMENT_BYTES: usize = 32;
/// What the key of an object is derived from.
const SALTED_BYTES: usize = MAGIC.len() + size_of::<u32>() + size_of::<u64>() + SALT_BYTES;
pub(super) const HEADER_BYTES: usize = SALTED_BYTES + COMMITMENT_BYTES;
/// Fits the second cache of a core, and is one write of a reasonable size.
pub(super) const FRAME_BYTES: usize = 256 << 10;
pub(super) const TAG_BYTES: usize = 16;
const SEALED_FRAME_BYTES: usize = FRAME_BYTES + TAG_BYTES;

/// Why bytes are not a sealed object of this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Problem {
    /// Changed, cut off, moved, or never sealed.
    Damaged(&'static str),
    /// Of a later version.
    Version(u32),
    /// Under a key that is not at hand.
    UnknownKey(KeyId),
}

/// Why an object was not opened.
#[derive(Debug)]
pub enum Failure {
    /// It is not what was sealed.
    Problem(Problem),
    /// The bytes could not be written on this side.
    Sink(io::Error),
}

impl std::fmt::Display for Problem {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Problem::Damaged(why) => write!(formatter, "{why}"),
            Problem::Version(version) => {
                write!(formatter, "is sealed in version {version}, this kvfs knows {VERSION}")
            }
            Problem::UnknownKey(id) => {
                write!(formatter, "is sealed with key {id}, which the key file does not hold")
            }
        }
    }
}

/// Length of an object of so many bytes once it is sealed.
pub fn sealed_length(bytes: u64) -> Option<u64> {
    let overhead = frames(bytes).checked_mul(TAG_BYTES as u64)?;
    bytes.checked_add(overhead)?.checked_add(HEADER_BYTES as u64)
}

/// Length of what was sealed in an object of so many bytes; `None` if no object has that length.
pub(super) fn plain_length(sealed: u64) -> Option<u64> {
    let body = sealed.checked_sub(HEADER_BYTES as u64)?;
    let frames = body.div_ceil((FRAME_BYTES + TAG_BYTES) as u64).max(1);
    let bytes = body.checked_sub(frames.checked_mul(TAG_BYTES as u64)?)?;
    (sealed_length(bytes) == Some(sealed)).then_some(bytes)
}

fn frames(bytes: u64) -> u64 {
    bytes.div_ceil(FRAME_BYTES as u64).max(1)
}

struct ObjectKey {
    cipher: Aes256GcmSiv,
    commitment: [u8; COMMITMENT_BYTES],
}

impl ObjectKey {
    fn derive(subkeys: &Subkeys, salted: &[u8], name: &str) -> ObjectKey {
        let mut output = [0; 32 + COMMITMENT_BYTES];
        let mut hasher = blake3::Hasher::new_keyed(&subkeys.contents);
        hasher.update(salted).update(name.as_bytes()).finalize_xof().fill(&mut output);
        let (key, commitment) = output.split_first_chunk::<32>().expect("64 bytes");
        let mut known = [0; COMMITMENT_BYTES];
        known.copy_from_slice(commitment);
        ObjectKey { cipher: Aes256GcmSiv::new(key.into()), commitment: known }
    }
}

fn nonce(number: u64, is_last: bool) -> Nonce {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8] = u8::from(is_last);
    bytes.into()
}

/// Seals bytes while they are read, in the buffer of the reader where a frame fits in. Each frame is
/// sealed once by a reader that goes forward.
pub struct SealedSource {
    plain: Source,
    header: [u8; HEADER_BYTES],
    cipher: Aes256GcmSiv,
    frame: Mutex<Frame>,
}

/// The frame that fits into no buffer so far, for the reads that take the rest of it.
#[derive(Default)]
struct Frame {
    number: Option<u64>,
    bytes: Vec<u8>,
}

impl std::fmt::Debug for SealedSource {
    /// Without keys and contents.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("SealedSource").finish_non_exhaustive()
    }
}

impl SealedSource {
    /// Of an object of this name.
    pub fn new(plain: Source, subkeys: &Subkeys, name: &str) -> io::Result<SealedSource> {
        let mut header = [0; HEADER_BYTES];
        let (salted, commitment) = header.split_at_mut(SALTED_BYTES);
        let (fixed, salt) = salted.split_at_mut(SALTED_BYTES - SALT_BYTES);
        fixed[..8].copy_from_slice(&MAGIC);
        fixed[8..12].copy_from_slice(&VERSION.to_le_bytes());
        fixed[12..].copy_from_slice(&subkeys.id.0.to_le_bytes());
        random(salt)?;
        let key = ObjectKey::derive(subkeys, salted, name);
        commitment.copy_from_slice(&key.commitment);
        Ok(SealedSource { plain, header, cipher: key.cipher, frame: Mutex::default() })
    }

    /// Bytes of a frame before it is sealed.
    fn plain_bytes(&self, number: u64) -> usize {
        let rest = self.plain.length() - number * FRAME_BYTES as u64;
        usize::try_from(rest).unwrap_or(usize::MAX).min(FRAME_BYTES)
    }

    /// Reads a frame and seals it in place, with its tag at the end.
    fn seal(&self, number: u64, sealed: &mut [u8]) -> io::Result<()> {
        let (frame, tag) = sealed.split_at_mut(sealed.len() - TAG_BYTES);
        self.plain.read_exact_at(frame, number * FRAME_BYTES as u64)?;
        let nonce = nonce(number, number + 1 == frames(self.plain.length()));
        let made = self
            .cipher
            .encrypt_inout_detached(&nonce, b"", InOutBuf::from(frame))
            .map_err(|_| io::Error::other("the cipher refused a frame"))?;
        tag.copy_from_slice(&made);
        Ok(())
    }
}

impl ReadAt for SealedSource {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let Some(place) = offset.checked_sub(HEADER_BYTES as u64) else {
            return self.header.as_slice().to_vec().read_at(buffer, offset);
        };
        let number = place / SEALED_FRAME_BYTES as u64;
        if number >= frames(self.plain.length()) {
            return Ok(0);
        }
        let within = place % SEALED_FRAME_BYTES as u64;
        let sealed_bytes = self.plain_bytes(number) + TAG_BYTES;
        if let (0, Some(whole)) = (within, buffer.get_mut(..sealed_bytes)) {
            // It has room for the frame: nothing to copy.
            self.seal(number, whole)?;
            return Ok(sealed_bytes);
        }
        let mut frame = self.frame.lock().unwrap_or_else(PoisonError::into_inner);
        if frame.number != Some(number) {
            frame.number = None;
            frame.bytes.resize(sealed_bytes, 0);
            self.seal(number, &mut frame.bytes)?;
            frame.number = Some(number);
        }
        frame.bytes.read_at(buffer, within)
    }
}

/// Opens a sealed object while it arrives, and passes on what proved to be genuine.
pub struct Unsealer {
    keys: Arc<[Subkeys]>,
    name: String,
    sink: Sink,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Progress {
    received: u64,
    /// The header or the frame that is arriving in parts.
    held: Vec<u8>,
    /// Room for a frame once it is opened, which nobody sees before it proved to be genuine.
    opened: Vec<u8>,
    /// Known once the header is.
    cipher: Option<Aes256GcmSiv>,
    frames: u64,
    written: u64,
    problem: Option<Problem>,
}

impl std::fmt::Debug for Unsealer {
    /// Without keys and contents.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Unsealer").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Unsealer {
    /// Of an object of this name, under any of the keys.
    pub fn new(keys: &Arc<[Subkeys]>, name: String, sink: Sink) -> Unsealer {
        let keys = Arc::clone(keys);
        Unsealer { keys, name, sink, progress: Mutex::default() }
    }

    /// What was wrong with the bytes so far.
    pub(super) fn problem(&self) -> Option<Problem> {
        self.lock().problem
    }

    /// Opens what is left, which must be the last frame; returns how many bytes were passed on.
    pub fn finish(&self) -> Result<u64, Failure> {
        let mut progress = self.lock();
        if progress.cipher.is_none() {
            return Err(Failure::Problem(Problem::Damaged("is cut off")));
        }
        self.open_held(&mut progress, true)?;
        Ok(progress.written)
    }

    fn take(&self, progress: &mut Progress, mut bytes: &[u8]) -> Result<(), Failure> {
        while !bytes.is_empty() {
            let wanted = if progress.cipher.is_some() { SEALED_FRAME_BYTES } else { HEADER_BYTES };
            if progress.held.len() == wanted {
                // More follows, so this is not the last.
                self.open_held(progress, false)?;
            }
            if progress.cipher.is_some()
                && progress.held.is_empty()
                && let Some((frame, rest)) = bytes.split_at_checked(SEALED_FRAME_BYTES)
                && !rest.is_empty()
            {
                // It is here as a whole and not the last: opened from where it lies.
                self.open_frame(progress, frame, false)?;
                bytes = rest;
                continue;
            }
            let count = bytes.len().min(wanted - progress.held.len());
            progress.held.extend_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            if progress.cipher.is_none() && progress.held.len() == HEADER_BYTES {
                progress.cipher = Some(self.open_header(&progress.held)?);
                progress.held.clear();
            }
        }
        Ok(())
    }

    fn open_header(&self, header: &[u8]) -> Result<Aes256GcmSiv, Failure> {
        let damaged = || Failure::Problem(Problem::Damaged("is not a sealed object"));
        let (salted, commitment) = header.split_at_checked(SALTED_BYTES).ok_or_else(damaged)?;
        let rest = salted.strip_prefix(&MAGIC).ok_or_else(damaged)?;
        let (version, rest) = rest.split_first_chunk().ok_or_else(damaged)?;
        let version = u32::from_le_bytes(*version);
        if version != VERSION {
            return Err(Failure::Problem(Problem::Version(version)));
        }
        let (id, _) = rest.split_first_chunk().ok_or_else(damaged)?;
        let id = KeyId(u64::from_le_bytes(*id));
        let subkeys = self.keys.iter().find(|subkeys| subkeys.id == id);
        let subkeys = subkeys.ok_or(Failure::Problem(Problem::UnknownKey(id)))?;
        let key = ObjectKey::derive(subkeys, salted, &self.name);
        if key.commitment == *commitment {
            Ok(key.cipher)
        } else {
            Err(Failure::Problem(Problem::Damaged("is not what was sealed under this name")))
        }
    }

    fn open_held(&self, progress: &mut Progress, is_last: bool) -> Result<(), Failure> {
        let mut held = std::mem::take(&mut progress.held);
        self.open_frame(progress, &held, is_last)?;
        held.clear();
        progress.held = held;
        Ok(())
    }

    /// Passes on what is in a frame, if it is genuine.
    fn open_frame(
        &self, progress: &mut Progress, sealed: &[u8], is_last: bool,
    ) -> Result<(), Failure> {
        let damaged = |why: &'static str| Failure::Problem(Problem::Damaged(why));
        let cipher = progress.cipher.as_ref().ok_or(damaged("is cut off"))?;
        let changed = || damaged("a part of it is not what was sealed");
        let (frame, tag) = sealed.split_last_chunk::<TAG_BYTES>().ok_or_else(changed)?;
        progress.opened.resize(frame.len(), 0);
        let nonce = nonce(progress.frames, is_last);
        let frame = InOutBuf::new(frame, &mut progress.opened).map_err(|_| changed())?;
        cipher
            .decrypt_inout_detached(&nonce, b"", frame, &Tag::from(*tag))
            .map_err(|_| changed())?;
        self.sink.write_all_at(&progress.opened, progress.written).map_err(Failure::Sink)?;
        progress.written += progress.opened.len() as u64;
        progress.frames += 1;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WriteAt for Unsealer {
    /// Stores hand out bytes in order.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut progress = self.lock();
        if offset != progress.received || progress.problem.is_some() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        progress.received += bytes.len() as u64;
        self.take(&mut progress, bytes).map_err(|failure| match failure {
            Failure::Sink(error) => error,
            Failure::Problem(problem) => {
                progress.problem = Some(problem);
                io::ErrorKind::InvalidData.into()
            }
        })
    }
}

#[cfg(test)]
mod tests;
