//! Listings: parts that fit in memory and in one deadline, and an end, whoever answers.
//!
//! What a listing says comes from whoever keeps the remote. One that never ends would keep its reader for ever, and
//! fill the memory of who remembers what it names. So this is the one place that says how much a listing may hold.
//! Who reads one remembers nothing of objects beyond 8 bytes each, or only those that he knows of otherwise.

use super::error::{RemoteError, Result};
use super::name::{RemoteName, RemotePrefix};
use super::{BlobStore, Stat};

/// Objects in one [`Listing`]: a quarter of a megabyte, and on a directory so many `stat`s, which
/// must fit one deadline at some 3 ms each.
pub const LISTING_MAX: usize = 4096;

/// Objects, or parts of manifests, in all listings of one look: 64 TB in objects of 1 MiB, and half a gigabyte
/// where 8 bytes of each are remembered.
pub const OBJECTS_MAX: u64 = 1 << 26;

/// Manifests of all stores, of which each keeps three: 87,000 stores. Their ids and numbers are remembered, 32 bytes
/// each and 8 MiB together.
pub const MANIFESTS_MAX: u64 = 1 << 18;

/// One object of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: RemoteName,
    /// Size and age.
    pub stat: Stat,
}

/// A part of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// At most [`LISTING_MAX`], in the order of names.
    pub objects: Vec<Listed>,
    /// Nothing follows.
    pub is_last: bool,
}

/// Visits every object of a prefix, a [`Listing`] at a time.
///
/// # Errors
/// [`RemoteError::Other`] if there are more than there can be, or the same ones again: nothing was understood then.
pub fn for_each(
    store: &dyn BlobStore, prefix: RemotePrefix, visit: impl FnMut(Listed) -> Result<()>,
) -> Result<()> {
    let most = match prefix {
        RemotePrefix::Blobs | RemotePrefix::Chunks => OBJECTS_MAX,
        RemotePrefix::Manifests | RemotePrefix::ManifestsOf(_) => MANIFESTS_MAX,
    };
    for_each_up_to(most, store, prefix, visit)
}

fn for_each_up_to(
    most: u64, store: &dyn BlobStore, prefix: RemotePrefix,
    mut visit: impl FnMut(Listed) -> Result<()>,
) -> Result<()> {
    let refused = |why: String| {
        let place = store.place();
        Err(RemoteError::Other(format!(
            "remote {place}: the listing of {prefix} {why}: see what answers there"
        )))
    };
    let (mut after, mut count) = (None::<RemoteName>, 0);
    loop {
        let listing = store.list(prefix, after)?;
        let last = listing.objects.last().map(|listed| listed.name);
        if last.is_none() && !listing.is_last {
            return refused("goes on with nothing".to_owned());
        }
        if let (Some(after), Some(last)) = (after, last)
            && last.to_string() <= after.to_string()
        {
            return refused(format!("goes on with {last} after {after}"));
        }
        after = last.or(after);
        count += listing.objects.len() as u64;
        if count > most {
            return refused(format!("has more than {most} names"));
        }
        for listed in listing.objects {
            visit(listed)?;
        }
        if listing.is_last {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests;
