//! What `--remote` names: a directory, or a bucket and a prefix in it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use super::BlobStore;
use super::counters::Counters;
use super::directory::Directory;
use super::error::Result;
use super::guard::Connector;
use super::object::{Bucket, Objects};

/// A place for a remote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteSpec {
    /// An absolute path.
    Directory(PathBuf),
    /// `s3://bucket/prefix`; the prefix may be empty.
    Object {
        /// The bucket.
        bucket: String,
        /// What all keys begin with, without a `/` at either end.
        prefix: String,
    },
}

impl fmt::Display for RemoteSpec {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RemoteSpec::Directory(path) => write!(formatter, "{}", path.display()),
            RemoteSpec::Object { bucket, prefix } if prefix.is_empty() => {
                write!(formatter, "s3://{bucket}")
            }
            RemoteSpec::Object { bucket, prefix } => write!(formatter, "s3://{bucket}/{prefix}"),
        }
    }
}

impl FromStr for RemoteSpec {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<RemoteSpec, String> {
        let Some((scheme, rest)) = text.split_once("://") else {
            let path = Path::new(text);
            return if path.is_absolute() {
                Ok(RemoteSpec::Directory(path.to_owned()))
            } else {
                Err(format!("remote {text:?}: give an absolute path or s3://BUCKET/PREFIX"))
            };
        };
        if scheme != "s3" {
            return Err(format!("remote {text:?}: no {scheme}://, give a directory or s3://"));
        }
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        if bucket.is_empty() || !bucket.bytes().all(legal) {
            return Err(format!("remote {text:?}: {bucket:?} is no name of a bucket"));
        }
        let parts = || prefix.split('/');
        let is_path = parts().all(|part| !["", ".", ".."].contains(&part));
        if !(prefix.is_empty() || is_path && parts().all(|part| part.bytes().all(legal))) {
            return Err(format!(
                "remote {text:?}: a prefix is made of letters, digits, '.', '-', '_' and '/'"
            ));
        }
        Ok(RemoteSpec::Object { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }
}

impl RemoteSpec {
    /// What connects to it. An object store takes endpoint, region and credentials from the
    /// `AWS_*` variables of the environment given.
    pub fn connector(
        &self, environment: impl IntoIterator<Item = (String, String)>,
    ) -> Arc<dyn Connector> {
        match self {
            RemoteSpec::Directory(path) => {
                Arc::new(DirectoryConnector { path: path.clone(), store: None })
            }
            RemoteSpec::Object { bucket, prefix } => {
                let aws = environment.into_iter().filter(|(name, _)| name.starts_with("AWS_"));
                let settings = aws.collect();
                let bucket = Bucket { name: bucket.clone(), prefix: prefix.clone(), settings };
                Arc::new(ObjectConnector(self.to_string(), bucket))
            }
        }
    }
}

/// What connects to a directory that a store keeps bytes in.
pub(super) fn directory_for(path: &Path, store: &Path) -> Arc<dyn Connector> {
    Arc::new(DirectoryConnector { path: path.to_owned(), store: Some(store.to_owned()) })
}

struct DirectoryConnector {
    path: PathBuf,
    store: Option<PathBuf>,
}

impl Connector for DirectoryConnector {
    fn place(&self) -> String {
        self.path.display().to_string()
    }

    fn connect(&self, _: &Counters) -> Result<Arc<dyn BlobStore>> {
        let directory = Directory::open(&self.path)?;
        if let Some(store) = &self.store {
            directory.check_outside(store)?;
        }
        Ok(Arc::new(directory))
    }
}

struct ObjectConnector(String, Bucket);

impl Connector for ObjectConnector {
    fn place(&self) -> String {
        self.0.clone()
    }

    fn connect(&self, counters: &Counters) -> Result<Arc<dyn BlobStore>> {
        Ok(Arc::new(Objects::open(&self.1, counters)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_and_anything_else_is_refused_in_one_line() {
        fn check(text: &str, expected: Option<&str>) {
            match text.parse::<RemoteSpec>() {
                Ok(spec) => assert_eq!(Some(spec.to_string().as_str()), expected),
                Err(error) => {
                    assert_eq!(expected, None, "{error}");
                    assert!(!error.contains('\n'), "{error}");
                }
            }
        }
        check("/mnt/share", Some("/mnt/share"));
        check("s3://bucket", Some("s3://bucket"));
        check("s3://bucket/", Some("s3://bucket"));
        check("s3://bucket/a/b/", Some("s3://bucket/a/b"));
        check("share", None);
        check("", None);
        check("s3://", None);
        check("s3:///prefix", None);
        check("s3://bucket/a//b", None);
        check("s3://bucket/../b", None);
        check("s3://bucket/a b", None);
        check("s3://buck?et/a", None);
        check("gs://bucket/a", None);
        check("s3://bucket/a\nb", None);
    }
}
