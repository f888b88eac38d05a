//! A pack: records one behind the other, and once it is complete an index of them at its end.

use std::cmp::Ordering;
use std::io;
use std::sync::Arc;

use super::record::{HEADER_BYTES, Header, Kind, Place, RawHeader, record_bytes};
use crate::store::disk::DiskFile;
use crate::store::record::{ObjectId, Time};

/// Bytes read at a time from a pack without an index.
const SCAN_BYTES: usize = 4 << 20;

/// Bytes read at a time where a disk cannot read all: what it reads as one.
const BLOCK_BYTES: usize = 4096;

/// Bytes of an index for one record: its offset and its header.
const ENTRY_BYTES: usize = 8 + 64;

/// The file of a pack, open.
#[derive(Clone, Debug)]
pub(super) struct PackFile {
    pub(super) number: u32,
    pub(super) file: Arc<dyn DiskFile>,
}

/// What is in a pack.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// Its records but for the index, in the order in which they were written.
    pub(super) records: Vec<(Place, Header)>,
    /// Where the next record would begin.
    pub(super) end: u64,
    /// Whether the pack is complete, and has an index that says so.
    pub(super) is_complete: bool,
    /// Whether the disk could not read some of it.
    pub(super) is_unreadable: bool,
}

impl PackFile {
    fn place(&self, offset: u64) -> Option<Place> {
        Some(Place { pack: self.number, offset: u32::try_from(offset).ok()? })
    }

    /// What is in it: what its index says, or what is found by looking at all of it.
    pub(super) fn read(&self) -> io::Result<Contents> {
        match self.read_index() {
            Ok(Some(contents)) => Ok(contents),
            Ok(None) => self.scan(),
            Err(error) => {
                log::error!("the index of packs/{:08x} cannot be read: {error}", self.number);
                self.scan()
            }
        }
    }

    pub(super) fn header(&self, offset: u64) -> io::Result<Option<Header>> {
        let mut raw: RawHeader = [0; 64];
        let Some(place) = self.place(offset) else { return Ok(None) };
        if self.file.read_at(&mut raw, offset)? < raw.len() {
            return Ok(None);
        }
        Ok(Header::decode(&raw, place))
    }

    /// The header of a record that was there once. Where it cannot be made out any more, the index of the pack has it, too.
    pub(super) fn known_header(&self, offset: u64) -> io::Result<Option<Header>> {
        match self.header(offset)? {
            Some(header) => Ok(Some(header)),
            None => self.header_in_index(offset),
        }
    }

    /// Looks for a record in the index alone, of which only some is read: others wait for the pack meanwhile.
    fn header_in_index(&self, offset: u64) -> io::Result<Option<Header>> {
        let Some((at, index)) = self.find_index()? else { return Ok(None) };
        let (mut begin, mut end) = (0, index.length / ENTRY_BYTES as u64);
        while begin < end {
            let middle = begin.midpoint(end);
            let entry = self.bytes(at + middle * ENTRY_BYTES as u64, ENTRY_BYTES as u64)?;
            let Some((place, header)) =
                entry.first_chunk().and_then(|entry| self.decode_entry(entry))
            else {
                return Ok(None);
            };
            match u64::from(place.offset).cmp(&offset) {
                Ordering::Less => begin = middle + 1,
                Ordering::Equal => return Ok(Some(header)),
                Ordering::Greater => end = middle,
            }
        }
        Ok(None)
    }

    /// Sees to it that a record that is known is there, as far as that is seen without reading all of it.
    ///
    /// # Errors
    /// `UnexpectedEof` if the pack was cut, EIO if it is damaged or another file, in whose place it may come back.
    pub(super) fn check(
        &self, offset: u32, is_known: impl FnOnce(&Header) -> bool,
    ) -> io::Result<()> {
        let header = self.known_header(u64::from(offset))?;
        let length = self.file.stat()?.length;
        let begin = u64::from(offset) + HEADER_BYTES;
        match header.filter(is_known) {
            Some(header) if begin + header.length <= length => Ok(()),
            None if begin <= length => Err(io::Error::from_raw_os_error(libc::EIO)),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// What the index of a complete pack says.
    pub(super) fn read_index(&self) -> io::Result<Option<Contents>> {
        let Some((at, index)) = self.find_index()? else { return Ok(None) };
        let Some(payload) = self.payload(at, &index)? else { return Ok(None) };
        let entries = payload.as_chunks::<ENTRY_BYTES>().0.iter();
        let records: Option<Vec<_>> = entries.map(|entry| self.decode_entry(entry)).collect();
        Ok(records.map(|records| Contents {
            records,
            end: at,
            is_complete: true,
            is_unreadable: false,
        }))
    }

    /// Where the index of a complete pack begins, and its header.
    fn find_index(&self) -> io::Result<Option<(u64, Header)>> {
        let length = self.file.stat()?.length;
        let Some(last) = length.checked_sub(HEADER_BYTES) else { return Ok(None) };
        let Some(Header { kind: Kind::End(at), .. }) = self.header(last)? else {
            return Ok(None);
        };
        let index = self.header(at)?.filter(|index| index.kind == Kind::Index);
        let index = index.filter(|index| at + index.record_bytes() == last);
        Ok(index.map(|index| (at, index)))
    }

    fn decode_entry(&self, entry: &[u8; ENTRY_BYTES]) -> Option<(Place, Header)> {
        let (offset, raw) = entry.split_first_chunk()?;
        let place = self.place(u64::from_le_bytes(*offset))?;
        Some((place, Header::decode(raw.try_into().ok()?, place)?))
    }

    /// Looks for records at every place where one can begin: what a crash has torn, or a disk has lost, hides
    /// none behind it. The bytes of an object count only if all of them are there.
    fn scan(&self) -> io::Result<Contents> {
        let length = self.file.stat()?.length;
        let mut found = Contents::default();
        let mut buffer = vec![0; SCAN_BYTES];
        let mut offset = 0;
        while offset + HEADER_BYTES <= length {
            let wanted = if found.is_unreadable { BLOCK_BYTES } else { SCAN_BYTES };
            let next = match self.file.read_at(&mut buffer[..wanted], offset) {
                Ok(count) => self.scan_piece(&buffer[..count], offset, &mut found),
                // What the disk cannot read hides nothing else: on in small steps.
                Err(_) if !found.is_unreadable => {
                    found.is_unreadable = true;
                    continue;
                }
                Err(_) => (offset + 1).next_multiple_of(BLOCK_BYTES as u64),
            };
            if next == offset {
                break;
            }
            offset = next;
        }
        if found.is_unreadable {
            log::error!("packs/{:08x} cannot be read whole", self.number);
        }
        Ok(found)
    }

    /// Looks at a piece; returns where the next one begins.
    fn scan_piece(&self, piece: &[u8], base: u64, found: &mut Contents) -> u64 {
        let mut at = 0;
        while let Some((raw, behind)) = piece[at..].split_first_chunk::<64>() {
            let offset = base + at as u64;
            let header = self.place(offset).and_then(|place| Header::decode(raw, place));
            let Some(header) = header else {
                at += raw.len();
                continue;
            };
            let length = usize::try_from(header.length).unwrap_or(usize::MAX);
            let is_whole = match behind.get(..length) {
                Some(payload) => header.length == 0 || header.is_of(payload),
                // It goes on in the next piece, or is longer than one.
                None => self.payload(offset, &header).is_ok_and(|payload| payload.is_some()),
            };
            if !is_whole || matches!(header.kind, Kind::Index | Kind::End(_)) {
                at += raw.len();
                continue;
            }
            let next = offset + header.record_bytes();
            found.records.extend(self.place(offset).map(|place| (place, header)));
            found.end = next;
            at = usize::try_from(next - base).unwrap_or(usize::MAX);
            if at >= piece.len() {
                return next;
            }
        }
        base + at as u64
    }

    /// The payload of a record, if it is what was written.
    pub(super) fn payload(&self, offset: u64, header: &Header) -> io::Result<Option<Vec<u8>>> {
        let rest = self.file.stat()?.length.saturating_sub(offset + HEADER_BYTES);
        if header.length > rest {
            return Ok(None);
        }
        let payload = self.bytes(offset, header.length)?;
        Ok(header.is_of(&payload).then_some(payload))
    }

    /// So many bytes behind the header at an offset, whatever they are.
    pub(super) fn bytes(&self, offset: u64, length: u64) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        let count = self.file.read_at(&mut bytes, offset + HEADER_BYTES)?;
        if count < bytes.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(bytes)
    }

    /// Puts the index behind the last record: once that is durable, the pack is complete.
    pub(super) fn write_index(&self, contents: &Contents) -> io::Result<()> {
        let mut payload = Vec::with_capacity(contents.records.len() * ENTRY_BYTES);
        for (place, header) in &contents.records {
            payload.extend_from_slice(&u64::from(place.offset).to_le_bytes());
            payload.extend_from_slice(&header.encode(*place));
        }
        let (nobody, never) = (ObjectId(0), Time::default());
        let at = contents.end;
        let last = at + record_bytes(payload.len() as u64);
        let index = Header::of(Kind::Index, nobody, never, &payload);
        let end =
            Header { kind: Kind::End(at), object: nobody, length: 0, mtime: never, checksum: 0 };
        let too_long = || io::Error::from_raw_os_error(libc::EFBIG);
        let mut bytes = index.encode(self.place(at).ok_or_else(too_long)?).to_vec();
        bytes.append(&mut payload);
        bytes.resize(usize::try_from(last - at).map_err(io::Error::other)?, 0);
        bytes.extend_from_slice(&end.encode(self.place(last).ok_or_else(too_long)?));
        // What an attempt that failed has left behind the last record.
        self.file.set_length(at)?;
        self.file.write_all_at(&bytes, at)
    }
}
