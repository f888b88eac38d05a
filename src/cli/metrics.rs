//! Where a mount serves its metrics: what can be said of the address before anything is begun.

use std::path::Path;

use super::output::{Failure, complain};
use crate::fuse::{MetricsAddress, MountOptions};

/// A socket named on the command line is relative to where the user is.
pub(super) fn absolute(address: String) -> Result<String, Failure> {
    let Some(path) = address.strip_prefix("unix:").filter(|path| !path.is_empty()) else {
        return Ok(address);
    };
    let failed = |why: String| Failure::Usage(format!("--metrics-addr {address}: {why}"));
    let path = std::path::absolute(path).map_err(|error| failed(error.to_string()))?;
    let path = path.to_str().ok_or_else(|| failed("the path is not UTF-8".to_owned()))?;
    Ok(format!("unix:{path}"))
}

/// Refuses a socket where nobody would find it, and says who can read an address that others reach.
pub(super) fn check(options: &MountOptions) -> Result<(), Failure> {
    let Some(address) = &options.metrics_address else { return Ok(()) };
    if let MetricsAddress::Unix(path) = address {
        in_nobodys_way(path, options).map_err(|why| {
            Failure::Failed(format!("metrics cannot be served at {address}: {why}"))
        })?;
    }
    if !address.is_local() {
        complain(
            "kvfs",
            &format!(
                "warning: metrics are served at {address} to whoever reaches this machine, \
                 unencrypted; 127.0.0.1:PORT and unix:PATH stay on it"
            ),
        );
    }
    Ok(())
}

fn in_nobodys_way(path: &Path, options: &MountOptions) -> Result<(), String> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let directory = directory
        .canonicalize()
        .map_err(|error| format!("directory {}: {error}", directory.display()))?;
    if directory.starts_with(&options.mountpoint) {
        return Err("the mount would hide it: choose a path outside of the mountpoint".to_owned());
    }
    if directory.starts_with(&options.store) {
        return Err("the store is the daemon's alone: choose a path outside of it".to_owned());
    }
    Ok(())
}
