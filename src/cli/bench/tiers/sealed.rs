//! What sealing a remote costs: the cipher alone on one core, and objects to and from a directory
//! against the same that is not sealed.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use nix::sys::resource::UsageWho;

use super::super::figure::{Better, Figure, Target};
use super::super::measure::{at, interleave, throughput, timed};
use super::super::note;
use super::super::transfer::gigabytes;
use super::super::workplace::Workplace;
use super::codec::processor_time;
use super::{MIB, Sizes, alone};
use crate::tier::content::ContentHash;
use crate::tier::encoding::Encoding;
use crate::tier::remote::directory::Directory;
use crate::tier::remote::seal::frames::{SealedSource, Unsealer, sealed_length};
use crate::tier::remote::seal::keys::Subkeys;
use crate::tier::remote::seal::{KeyRing, Seal, Sealed};
use crate::tier::remote::{
    BlobName, BlobStore, Extent, Numbers, PutMode, RemoteError, RemoteId, RemoteName, Source,
    WriteAt, attach_sealed,
};

/// An object as large as a page of the large model.
const OBJECT_BYTES: u64 = 4 * MIB;
/// What the cipher has to reach on one core.
const CIPHER_TARGET: f64 = 2.0;
/// Of what a remote that is not sealed moves.
const SHARE_TARGET: f64 = 0.8;

/// Where bytes go that nobody needs.
struct Nowhere;

impl WriteAt for Nowhere {
    fn write_all_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        Ok(())
    }
}

pub(super) fn figures(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("sealing");
    let keys = KeyRing::generate().map_err(|error| error.to_string())?;
    let keys: Arc<KeyRing> = Arc::new(keys.parse()?);
    let mut figures = cipher(&keys, sizes)?;
    let sealed = open(&workplace.native().join("sealed"), Some(&keys))?;
    let plain = open(&workplace.native().join("plain"), None)?;
    let objects = Objects::new(sizes.pages)?;
    let puts = interleave(
        sizes.long_rounds,
        |_| objects.put(sealed.as_ref()),
        |_| objects.put(plain.as_ref()),
    )?;
    figures.push(gigabytes("put_sealed", SHARE_TARGET, puts));
    let gets = interleave(
        sizes.rounds,
        |_| objects.get(sealed.as_ref()),
        |_| objects.get(plain.as_ref()),
    )?;
    figures.push(gigabytes("get_sealed", SHARE_TARGET, gets));
    Ok(figures)
}

fn open(path: &Path, keys: Option<&Arc<KeyRing>>) -> Result<Arc<dyn BlobStore>, String> {
    fs::create_dir(path).map_err(at(path))?;
    let store: Arc<dyn BlobStore> = Arc::new(Directory::open(path).map_err(at(path))?);
    let id = attach_sealed(store.as_ref(), None, keys.map(Arc::as_ref)).map_err(at(path))?;
    let seal =
        keys.map(|keys| Seal { keys: Arc::clone(keys), numbers: Arc::new(Numbers::default()) });
    Ok(seal.map_or_else(
        || Arc::clone(&store),
        |seal| Arc::new(Sealed::new(Arc::clone(&store), id, &seal)) as Arc<dyn BlobStore>,
    ))
}

/// Objects of the same bytes, which no store looks at.
struct Objects {
    names: Vec<RemoteName>,
    bytes: Arc<Vec<u8>>,
}

impl Objects {
    fn new(count: u64) -> Result<Objects, String> {
        let length = usize::try_from(OBJECT_BYTES).map_err(|error| error.to_string())?;
        let name = |number: u64| {
            let content = ContentHash::of(&number.to_le_bytes());
            RemoteName::Blob(BlobName { content, encoding: Encoding::Raw })
        };
        Ok(Objects { names: (0..count).map(name).collect(), bytes: Arc::new(vec![0x5a; length]) })
    }

    /// GB/s to a store.
    fn put(&self, store: &dyn BlobStore) -> Result<f64, String> {
        self.each(|name| {
            let source = Source::new(Arc::clone(&self.bytes) as Arc<_>, OBJECT_BYTES);
            store.put(name, source, PutMode::Replace).map(drop)
        })
    }

    /// GB/s from a store.
    fn get(&self, store: &dyn BlobStore) -> Result<f64, String> {
        let extent = Extent::Whole { bytes: Some(OBJECT_BYTES) };
        self.each(|name| store.get(name, extent, Arc::new(Nowhere)).map(drop))
    }

    fn each(&self, act: impl Fn(RemoteName) -> Result<(), RemoteError>) -> Result<f64, String> {
        let duration = timed(|| {
            self.names.iter().try_for_each(|name| act(*name).map_err(|error| error.to_string()))
        })?;
        Ok(throughput(OBJECT_BYTES * self.names.len() as u64, duration))
    }
}

/// Frames sealed and opened in memory, by one thread.
fn cipher(keys: &KeyRing, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    const NAME: &str = "blobs/00/00.raw";
    let length = usize::try_from(OBJECT_BYTES).map_err(|error| error.to_string())?;
    let plain = Arc::new(vec![0x5a_u8; length]);
    let subkeys: Arc<[Subkeys]> = keys.subkeys(RemoteId(0)).into();
    let first = subkeys.first().ok_or("no key")?;
    let (mut sealing, mut opening) = (Vec::new(), Vec::new());
    let total = OBJECT_BYTES * sizes.pages;
    let length = sealed_length(OBJECT_BYTES).ok_or("too long")?;
    let mut sealed = vec![0; usize::try_from(length).map_err(|error| error.to_string())?];
    for _ in 0..sizes.rounds {
        sealing.push(per_core(total, || {
            (0..sizes.pages).try_for_each(|_| {
                let source = Source::new(Arc::clone(&plain) as Arc<_>, OBJECT_BYTES);
                let source = Arc::new(SealedSource::new(source, first, NAME)?);
                Source::new(source, length).read_exact_at(&mut sealed, 0)
            })
        })?);
        opening.push(per_core(total, || {
            (0..sizes.pages).try_for_each(|_| {
                let unsealer = Unsealer::new(&subkeys, NAME.to_owned(), Arc::new(Nowhere));
                unsealer.write_all_at(&sealed, 0)?;
                unsealer.finish().map(drop).map_err(|why| io::Error::other(format!("{why:?}")))
            })
        })?);
    }
    let figure = |name, values| {
        let figure = alone(name, "GB/s", Target::Absolute(CIPHER_TARGET), values);
        Figure { better: Better::Higher, ..figure }
    };
    Ok(vec![figure("seal_per_core", sealing), figure("open_sealed_per_core", opening)])
}

/// GB per second of processor time.
fn per_core(bytes: u64, act: impl FnOnce() -> io::Result<()>) -> Result<f64, String> {
    let before = processor_time(UsageWho::RUSAGE_SELF)?;
    act().map_err(|error| error.to_string())?;
    Ok(throughput(bytes, processor_time(UsageWho::RUSAGE_SELF)?.saturating_sub(before)))
}
