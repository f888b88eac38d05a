//! What readers tell the mount.

use crate::common::Mode;
use crate::common::sys::{assert_errno, getxattr, listxattr, setxattr};
use crate::prepared::{EVERYTHING, Prepared};

in_both_modes!(what_was_read_is_in_the_metrics, reports_that_make_no_sense_are_refused);

const SMALL: [u32; 4] = [2, 2, 16, 32];

fn what_was_read_is_in_the_metrics(mode: Mode) {
    let prepared = Prepared::new(mode, &["--ram", "64M"], SMALL);
    prepared.fill(12, 3);
    let sequence = prepared.open(EVERYTHING, 1 << 20);
    prepared.check(&sequence, 387);
    prepared.check(&sequence, 387);
    sequence.report().unwrap();
    let counts = sequence.counts();
    let metric = |name: &str, link: &str| {
        prepared.mount.metric(&format!("kvfs_attention_{name}_total{{link=\"{link}\"}}"))
    };
    assert!(counts.resident_bytes > 0);
    assert_eq!(metric("bytes", "memory"), counts.resident_bytes);
    assert_eq!(metric("bytes", "mount"), counts.streamed_bytes);
    assert_eq!(metric("prefetched_bytes", "mount"), counts.prefetched_bytes);
    assert_eq!(metric("stalled_bytes", "mount"), counts.stalled_bytes);
    // Nothing is told twice, and closing tells the rest.
    sequence.report().unwrap();
    assert_eq!(metric("bytes", "memory"), counts.resident_bytes);
    prepared.check(&sequence, 387);
    let counts = sequence.counts();
    drop(sequence);
    assert_eq!(metric("bytes", "memory"), counts.resident_bytes);
}

fn reports_that_make_no_sense_are_refused(mode: Mode) {
    let prepared = Prepared::new(mode, &[], SMALL);
    prepared.fill(1, 0);
    let set = |path, report: &str| setxattr(path, "user.kvfs.reader", report.as_bytes());
    assert_errno(set(prepared.sequence(), "resident_bytes=-1"), libc::EINVAL);
    assert_errno(set(prepared.sequence(), "bytes=1"), libc::EINVAL);
    assert_errno(set(prepared.sequence(), ""), libc::EINVAL);
    assert_errno(set(prepared.sequence(), &"resident_bytes=1 ".repeat(20)), libc::EINVAL);
    assert_errno(set(prepared.page_path(0, 0), "resident_bytes=1"), libc::EOPNOTSUPP);
    assert_errno(set(prepared.mount.join(".kvfs/metrics"), "resident_bytes=1"), libc::EOPNOTSUPP);
    set(prepared.sequence(), "resident_bytes=7").unwrap();
    assert_eq!(prepared.mount.metric(r#"kvfs_attention_bytes_total{link="memory"}"#), 7);
    // It is told, not kept.
    assert_errno(getxattr(prepared.sequence(), "user.kvfs.reader"), libc::ENODATA);
    assert!(listxattr(prepared.sequence()).unwrap().is_empty());
    let served_by = getxattr(prepared.page_path(0, 0), "user.kvfs.served_by").unwrap();
    assert_eq!(served_by, if mode == Mode::Passthrough { "kernel" } else { "daemon" });
}
