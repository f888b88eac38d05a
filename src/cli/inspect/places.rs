//! Where the files of layers are, as the mount tells it: nothing is opened, and nothing fetched.

use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

use crate::cli::duration::age;
use crate::cli::map::{Place, layer_pages};
use crate::cli::output::{bytes, counted};
use crate::cli::summary::Summary;

/// Of all layers that were looked at.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// By [`Place`].
    files: [u64; Place::ALL.len()],
    bytes: [u64; Place::ALL.len()],
    shared_bytes: u64,
    used_seconds: u64,
    /// A copy of a layer tells nothing.
    is_unknown: bool,
}

impl Places {
    pub(super) fn add_layer(&mut self, layer: &Path) -> io::Result<()> {
        let Some(pages) = layer_pages(layer)? else {
            self.is_unknown = true;
            return Ok(());
        };
        for page in pages {
            self.files[page.place as usize] += 1;
            self.bytes[page.place as usize] += page.bytes;
            self.shared_bytes += if page.is_shared() { page.bytes } else { 0 };
            self.used_seconds = self.used_seconds.max(page.used_seconds);
        }
        Ok(())
    }

    /// Adds what is known of all layers, or nothing.
    pub(super) fn describe(&self, summary: &mut Summary) {
        if self.is_unknown || self.files.iter().all(|files| *files == 0) {
            return;
        }
        for place in Place::ALL {
            let (files, count) = (self.files[place as usize], self.bytes[place as usize]);
            if files > 0 {
                let text = format!("{}, {}", counted(files, "file", "files"), bytes(count));
                let value = json!({ "files": files, "bytes": count });
                summary.add_with_text(place.name(), value, text);
            }
        }
        let own_bytes = self.bytes.iter().sum::<u64>() - self.shared_bytes;
        summary.add_bytes("own_bytes", own_bytes);
        summary.add_bytes("shared_bytes", self.shared_bytes);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let text = format!("{} ago", age(now.saturating_sub(self.used_seconds)));
        summary.add_with_text("used_unix_seconds", self.used_seconds.into(), text);
    }
}
