//! An S3-compatible object store.
//!
//! Endpoint, region and credentials come from the `AWS_*` variables that the tools of AWS use;
//! `AWS_ALLOW_HTTP=true` allows an endpoint without TLS. An object up to [`PART_BYTES`] is put by
//! one request with `If-None-Match: *`; a larger one in parts, which become an object at once. The
//! condition is then a look before: both of two machines that put the same name would store the
//! same content, so the second changes nothing. Manifests and the marker, which must be exclusive,
//! always go in one request.
//!
//! Parts of an upload that was cut off by a crash are invisible but stored: give the bucket a
//! lifecycle rule that aborts incomplete multipart uploads after a day.

mod attempts;
mod classify;
mod patience;

use std::time::{Duration, SystemTime};

use futures_util::{StreamExt, TryStreamExt};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutOptions, RetryConfig, WriteMultipart,
};
use tokio::runtime::Runtime;

use self::attempts::CountingConnector;
use self::classify::{classify, has_lost_connection};
use super::counters::Counters;
use super::error::{RemoteError, Result};
use super::name::{RemoteName, RemotePrefix};
use super::pool;
use super::transfer::{Extent, Sink, Source};
use super::{BlobStore, LISTING_MAX, Listed, Listing, Put, PutMode, Stat};

/// Part of a multipart upload, and the largest object that is put whole. S3 wants at least 5 MiB;
/// a transfer holds five of them in memory.
pub const PART_BYTES: u64 = 8 << 20;
/// Parts sent at a time: enough for 100 MB/s at 200 ms to the server.
const PARTS_IN_FLIGHT: usize = 4;
/// S3 takes 10,000 parts; larger objects have larger parts.
const PARTS_MAX: u64 = 9_000;
/// Attempts beside the first, and the time in which they begin. Must end before
/// [`super::Limits::quiet_max`], which would take a server that is busy for one that hangs.
const RETRIES_MAX: usize = 3;
const RETRIES_WITHIN: Duration = Duration::from_secs(15);
/// For one TCP and TLS handshake.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Longest silence of the server, beside the time that the bytes of a request take on a slow link.
pub(super) const READ_MAX: Duration = Duration::from_secs(15);
/// For a part of a listing, with its repetitions. It comes in pages, of which a server may give one after the other
/// without a name in them, or each byte by byte; shorter than [`super::Limits::quiet_max`], so that the call ends
/// by itself, and its thread with it.
const LIST_MAX: Duration = Duration::from_secs(25);
/// A look and a deletion: each with its repetitions, the last of which may wait for its answer.
pub const SETTLING: Duration = RETRIES_WITHIN.saturating_add(READ_MAX).saturating_mul(2);
/// How often a call that waits for the network says that it does.
const SIGN_EVERY: Duration = Duration::from_secs(1);
/// Threads that do network I/O: one core moves more than 1 GB/s without TLS, half with.
const IO_THREADS: usize = 2;

/// A place in an object store, and how to get in.
#[derive(Clone)]
pub struct Bucket {
    /// Name of the bucket.
    pub name: String,
    /// What all keys begin with, without a `/` at either end; may be empty.
    pub prefix: String,
    /// `AWS_*` variables with their values.
    pub settings: Vec<(String, String)>,
}

/// Without the settings: they hold secrets.
impl std::fmt::Debug for Bucket {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Bucket({}/{})", self.name, self.prefix)
    }
}

/// An open place in an object store.
#[derive(Debug)]
pub struct Objects {
    store: AmazonS3,
    prefix: Path,
    place: String,
    io: Io,
}

/// The runtime of the requests. Dropped without waiting: a name server may not answer.
#[derive(Debug)]
struct Io(Option<Runtime>);

impl Io {
    fn new() -> std::io::Result<Io> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(IO_THREADS).thread_name("kvfs-remote-io").enable_all();
        builder.build().map(|runtime| Io(Some(runtime)))
    }

    /// Each request in it ends by itself ([`patience`]), so the call makes progress as long as it is in here.
    fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        let runtime = self.0.as_ref().expect("there until dropped");
        runtime.block_on(async {
            let mut future = std::pin::pin!(future);
            loop {
                match tokio::time::timeout(SIGN_EVERY, future.as_mut()).await {
                    Ok(outcome) => return outcome,
                    Err(_) => pool::show_progress(),
                }
            }
        })
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

impl Objects {
    /// Prepares requests; makes none. They are counted where they are repeated.
    pub fn open(bucket: &Bucket, counters: &Counters) -> Result<Objects> {
        let place = match bucket.prefix.as_str() {
            "" => format!("s3://{}", bucket.name),
            prefix => format!("s3://{}/{prefix}", bucket.name),
        };
        let backoff = BackoffConfig { max_backoff: Duration::from_secs(2), ..Default::default() };
        let retries =
            RetryConfig { backoff, max_retries: RETRIES_MAX, retry_timeout: RETRIES_WITHIN };
        // The whole of a transfer may take long; its parts have their limits in `patience`.
        let client = ClientOptions::new().with_timeout_disabled().with_connect_timeout(CONNECT_MAX);
        let mut builder = AmazonS3Builder::new().with_client_options(client);
        for (name, value) in &bucket.settings {
            // Many variables are for other tools.
            if let Ok(key) = name.to_ascii_lowercase().parse() {
                builder = builder.with_config(key, value);
            }
        }
        // An error says that it is known already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store = builder
            .with_bucket_name(&bucket.name)
            .with_retry(retries)
            .with_disable_bulk_delete(true)
            .with_http_connector(CountingConnector(counters.retried()))
            .build()
            .map_err(|error| {
                RemoteError::Other(format!("remote {place}: {error}; check the AWS_* variables"))
            })?;
        let io = Io::new().map_err(RemoteError::local)?;
        Ok(Objects { store, prefix: Path::from(bucket.prefix.as_str()), place, io })
    }

    fn key(&self, name: impl std::fmt::Display) -> Path {
        let name = name.to_string();
        name.split('/').fold(self.prefix.clone(), Path::join)
    }

    fn failed(
        &self, what: &str, name: impl std::fmt::Display,
    ) -> impl Fn(object_store::Error) -> RemoteError {
        let place = &self.place;
        move |error| classify(&format!("remote {place}: {what} {name}"), &error)
    }

    async fn put_whole(&self, key: &Path, source: &Source, mode: PutMode) -> Step<Put> {
        let length = usize::try_from(source.length()).map_err(too_long)?;
        let mut bytes = vec![0; length];
        source.read_exact_at(&mut bytes, 0).map_err(Failure::Local)?;
        let mode = match mode {
            PutMode::IfAbsent => object_store::PutMode::Create,
            PutMode::Replace => object_store::PutMode::Overwrite,
        };
        match self.store.put_opts(key, bytes.into(), PutOptions::from(mode)).await {
            Ok(_) => Ok(Put::Stored),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(Put::AlreadyThere),
            Err(error) => Err(error.into()),
        }
    }

    async fn put_parts(&self, key: &Path, source: &Source) -> Step<Put> {
        let part_bytes = PART_BYTES.max(source.length() / PARTS_MAX);
        let part_bytes = usize::try_from(part_bytes).map_err(too_long)?;
        let upload = self.store.put_multipart(key).await?;
        let mut writer = WriteMultipart::new_with_chunk_size(upload, part_bytes);
        match send_parts(&mut writer, source, part_bytes).await {
            Ok(()) => {
                writer.finish().await?;
                Ok(Put::Stored)
            }
            Err(failure) => {
                // The first failure is what counts.
                let _ = writer.abort().await;
                Err(failure)
            }
        }
    }

    async fn copy_out(result: GetResult, sink: &Sink) -> Step<u64> {
        let expected = result.range.end - result.range.start;
        let mut arrival = result.into_stream();
        let mut done = 0;
        while let Some(bytes) = arrival.try_next().await? {
            sink.write_all_at(&bytes, done).map_err(Failure::Local)?;
            done += bytes.len() as u64;
        }
        if done == expected { Ok(done) } else { Err(Failure::Short(done, expected)) }
    }

    /// Reads an object and puts it again. A copy onto itself would move no bytes, but S3 refuses
    /// it unless metadata change, and some servers truncate the object.
    async fn rewrite(&self, key: &Path) -> Step<()> {
        let result = self.store.get(key).await?;
        let size = result.meta.size;
        let mut arrival = result.into_stream();
        if size <= PART_BYTES {
            let mut bytes = Vec::new();
            while let Some(part) = arrival.try_next().await? {
                bytes.extend_from_slice(&part);
            }
            let done = bytes.len() as u64;
            if done != size {
                return Err(Failure::Short(done, size));
            }
            self.store.put(key, bytes.into()).await?;
            return Ok(());
        }
        let upload = self.store.put_multipart(key).await?;
        let part_bytes = PART_BYTES.max(size / PARTS_MAX);
        let part_bytes = usize::try_from(part_bytes).map_err(too_long)?;
        let mut writer = WriteMultipart::new_with_chunk_size(upload, part_bytes);
        let mut done = 0;
        let copied: Step<()> = async {
            while let Some(bytes) = arrival.try_next().await? {
                done += bytes.len() as u64;
                writer.wait_for_capacity(PARTS_IN_FLIGHT).await?;
                writer.put(bytes);
            }
            Ok(())
        }
        .await;
        match copied {
            Ok(()) if done == size => {
                writer.finish().await?;
                Ok(())
            }
            outcome => {
                let _ = writer.abort().await;
                outcome?;
                Err(Failure::Short(done, size))
            }
        }
    }

    fn listed(&self, meta: &ObjectMeta) -> Option<Listed> {
        let whole = meta.location.as_ref();
        let path = match self.prefix.as_ref() {
            "" => whole,
            prefix => whole.strip_prefix(prefix)?.strip_prefix('/')?,
        };
        Some(Listed { name: path.parse().ok()?, stat: stat(meta) })
    }

    /// Lists, and gives up a listing that comes too slowly.
    fn list_in_time<T>(
        &self, what: impl std::fmt::Display, listing: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let outcome = self.io.wait(async { tokio::time::timeout(LIST_MAX, listing).await });
        outcome.unwrap_or_else(|_| {
            let (place, seconds) = (&self.place, LIST_MAX.as_secs());
            Err(RemoteError::Timeout(format!(
                "remote {place}: list {what}: no part of it came whole within {seconds} s"
            )))
        })
    }

    fn settle<T>(&self, what: &str, name: RemoteName, outcome: Step<T>) -> Result<T> {
        outcome.map_err(|failure| match failure {
            Failure::Store(error) => self.failed(what, name)(error),
            Failure::Local(error) => RemoteError::local(error),
            Failure::Short(found, expected) => RemoteError::Corrupt(format!(
                "remote {}: {name} gave {found} bytes instead of {expected}",
                self.place
            )),
        })
    }
}

/// Why a step of a transfer failed.
enum Failure {
    Store(object_store::Error),
    Local(std::io::Error),
    Short(u64, u64),
}
type Step<T> = std::result::Result<T, Failure>;

impl Failure {
    fn is_of_connection(&self) -> bool {
        matches!(self, Failure::Store(error) if has_lost_connection(error))
    }
}

impl From<object_store::Error> for Failure {
    fn from(error: object_store::Error) -> Failure {
        Failure::Store(error)
    }
}

fn too_long(_: std::num::TryFromIntError) -> Failure {
    Failure::Local(std::io::Error::from_raw_os_error(libc::EFBIG))
}

async fn send_parts(writer: &mut WriteMultipart, source: &Source, part_bytes: usize) -> Step<()> {
    let mut offset = 0;
    while offset < source.length() {
        let rest = usize::try_from(source.length() - offset).unwrap_or(usize::MAX);
        let mut part = vec![0; rest.min(part_bytes)];
        source.read_exact_at(&mut part, offset).map_err(Failure::Local)?;
        offset += part.len() as u64;
        writer.wait_for_capacity(PARTS_IN_FLIGHT).await?;
        writer.put(part.into());
    }
    Ok(())
}

fn stat(meta: &ObjectMeta) -> Stat {
    Stat { bytes: meta.size, modified: meta.last_modified.into() }
}

impl BlobStore for Objects {
    fn place(&self) -> &str {
        &self.place
    }

    fn put(&self, name: RemoteName, source: Source, mode: PutMode) -> Result<Put> {
        let key = self.key(name);
        let is_exclusive = matches!(name, RemoteName::Marker | RemoteName::Manifest(..));
        if is_exclusive || source.length() <= PART_BYTES {
            let mut outcome = self.io.wait(self.put_whole(&key, &source, mode));
            // The client repeats only what it knows not to have been carried out, or to change nothing then; that a
            // name tells its content it does not know.
            if !is_exclusive && outcome.as_ref().is_err_and(Failure::is_of_connection) {
                outcome = self.io.wait(self.put_whole(&key, &source, mode));
            }
            return self.settle("put", name, outcome);
        }
        if mode == PutMode::IfAbsent && self.head(name)?.is_some() {
            return Ok(Put::AlreadyThere);
        }
        self.settle("put", name, self.io.wait(self.put_parts(&key, &source)))
    }

    fn get(&self, name: RemoteName, extent: Extent, sink: Sink) -> Result<u64> {
        let corrupt = |why| RemoteError::Corrupt(format!("remote {}: {name} {why}", self.place));
        if let Extent::Part { bytes: 0, .. } = extent {
            return Ok(0);
        }
        let range = match extent {
            Extent::Whole { .. } => None,
            Extent::Part { offset, bytes } => {
                let end = offset.checked_add(bytes).ok_or_else(|| {
                    RemoteError::Other(format!("{bytes} bytes from {offset} are too many"))
                })?;
                Some(GetRange::Bounded(offset..end))
            }
        };
        let options = GetOptions::new().with_range(range);
        let outcome = self.io.wait(self.store.get_opts(&self.key(name), options));
        let result = outcome.map_err(self.failed("get", name))?;
        let (start, length) = extent.within(result.meta.size).map_err(corrupt)?;
        if result.range != (start..start + length) {
            return Err(corrupt(format!("gave another range: {:?}", result.range)));
        }
        self.settle("get", name, self.io.wait(Objects::copy_out(result, &sink)))
    }

    fn head(&self, name: RemoteName) -> Result<Option<Stat>> {
        match self.io.wait(self.store.head(&self.key(name))) {
            Ok(meta) => Ok(Some(stat(&meta))),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed("head", name)(error)),
        }
    }

    fn refresh(&self, name: RemoteName) -> Result<()> {
        self.settle("refresh", name, self.io.wait(self.rewrite(&self.key(name))))
    }

    fn delete(&self, name: RemoteName) -> Result<()> {
        match self.io.wait(self.store.delete(&self.key(name))) {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed("delete", name)(error)),
        }
    }

    fn delete_if_older(&self, name: RemoteName, than: SystemTime) -> Result<bool> {
        let is_older = self.head(name)?.is_some_and(|stat| stat.modified < than);
        if is_older {
            self.delete(name)?;
        }
        Ok(is_older)
    }

    fn settling(&self) -> Duration {
        SETTLING
    }

    fn list(&self, prefix: RemotePrefix, after: Option<RemoteName>) -> Result<Listing> {
        let path = self.key(prefix);
        let mut stream = match after {
            Some(name) => self.store.list_with_offset(Some(&path), &self.key(name)),
            None => self.store.list(Some(&path)),
        };
        let mut objects = Vec::new();
        self.list_in_time(prefix, async {
            while objects.len() < LISTING_MAX {
                match stream.try_next().await.map_err(self.failed("list", prefix))? {
                    Some(meta) => objects.extend(self.listed(&meta)),
                    None => return Ok(Listing { objects, is_last: true }),
                }
            }
            Ok(Listing { objects, is_last: false })
        })
    }

    fn sweep(&self, _: SystemTime) -> Result<u64> {
        Ok(0)
    }

    fn is_vacant(&self) -> Result<bool> {
        let prefix = Some(&self.prefix).filter(|prefix| !prefix.as_ref().is_empty());
        let what = "the bucket";
        self.list_in_time(what, async {
            let first = self.store.list(prefix).next().await.transpose();
            first.map(|first| first.is_none()).map_err(self.failed("list", what))
        })
    }
}
