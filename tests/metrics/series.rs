//! The series themselves: of which mount and tier, and none of what never happened.

use std::collections::BTreeSet;
use std::fs;

use crate::common::sys::{assert_errno, open};
use crate::common::{Mode, Mount};
use crate::exported;
use crate::place::{BUDGET_BYTES, Place, kvfs, printed};

in_both_modes!(
    each_series_names_its_mount,
    a_budget_is_the_capacity_of_its_tier,
    what_never_happened_has_no_series,
    buckets_double_and_are_few,
    errors_name_the_tier_that_had_the_bytes,
);

fn each_series_names_its_mount(mode: Mode) {
    let mount = Mount::new(mode);
    let mountpoint = mount.path().to_str().unwrap();
    let families = exported::of(&mount);
    assert!(families.len() > 15, "{families:#?}");
    for series in families.values().flat_map(|family| &family.series) {
        let label = series.labels.get("mount").map(String::as_str);
        assert_eq!(label, Some(mountpoint), "{series:?}");
    }
}

fn a_budget_is_the_capacity_of_its_tier(mode: Mode) {
    let place = Place::with_budget(mode, &["--ram", "8M"]);
    let mount = &place.mount;
    let disk_bytes = mount.metric("kvfs_disk_size_bytes");
    assert_eq!(mount.metric("kvfs_tier_capacity_bytes{tier=\"ssd\"}"), BUDGET_BYTES);
    assert_eq!(mount.metric("kvfs_tier_capacity_bytes{tier=\"ram\"}"), 8 << 20);
    assert!(disk_bytes > BUDGET_BYTES);
    // What leaves the disk is not counted there any more.
    place.write("f", 8);
    place.wait_until_it_fits();
    assert_eq!(mount.metric("kvfs_bytes"), 8 * (4 << 20));
    let used = mount.metric("kvfs_tier_used_bytes{tier=\"ssd\"}");
    assert!(used > 0 && used <= BUDGET_BYTES, "{used}");
    assert_eq!(mount.metric("kvfs_tier_free_bytes{tier=\"ssd\"}"), BUDGET_BYTES - used);
    assert_eq!(mount.metric("kvfs_tier_used_bytes{tier=\"remote\"}"), 8 * (4 << 20));
    assert_eq!(mount.metric("kvfs_tier_objects{tier=\"remote\"}"), 8);
    let left = mount.metric("kvfs_remote_only_objects");
    assert!(left > 0);
    assert_eq!(mount.metric("kvfs_tier_objects{tier=\"ssd\"}"), 8 - left);

    let unlimited = Mount::new(mode);
    let capacity = unlimited.metric("kvfs_tier_capacity_bytes{tier=\"ssd\"}");
    assert_eq!(capacity, unlimited.metric("kvfs_disk_size_bytes"));
}

fn what_never_happened_has_no_series(mode: Mode) {
    let mount = Mount::new(mode);
    let operations = || {
        let families = exported::of(&mount);
        let told = ["kvfs_fuse_requests_total", "kvfs_fuse_request_duration_seconds"];
        let series = told.into_iter().flat_map(|name| &families[name].series);
        series.map(|series| series.labels["op"].clone()).collect::<BTreeSet<_>>()
    };
    let before = operations();
    assert!(before.contains("lookup"), "{before:?}");
    assert!(!before.contains("link") && !before.contains("fallocate"), "{before:?}");
    fs::write(mount.files("a"), b"a").unwrap();
    fs::hard_link(mount.files("a"), mount.files("b")).unwrap();
    assert!(operations().contains("link"));
    // Neither is there a tier, a remote or a reader.
    let families = exported::of(&mount);
    for (name, family) in &families {
        assert!(!name.starts_with("kvfs_remote_"), "{name}");
        assert!(!name.starts_with("kvfs_attention_"), "{name}");
        assert!(!name.starts_with("kvfs_retention_"), "{name}");
        let tiers = family.series.iter().filter_map(|series| series.labels.get("tier"));
        assert!(tiers.clone().all(|tier| tier == "ssd"), "{family:#?}");
    }
}

fn buckets_double_and_are_few(mode: Mode) {
    let place = Place::new(mode, &[]);
    place.write("f", 1);
    place.wait_until_uploaded();
    let families = exported::of(&place.mount);
    let mut checked = 0;
    for family in families.values().filter(|family| family.kind == "histogram") {
        let first = &family.series[0].labels["op"];
        let of_first = family.series.iter().filter(|series| &series.labels["op"] == first);
        let bounds: Vec<f64> = of_first
            .filter_map(|series| series.labels.get("le"))
            .filter(|bound| *bound != "+Inf")
            .map(|bound| bound.parse().unwrap())
            .collect();
        assert!((10..=25).contains(&bounds.len()), "{bounds:?}");
        for pair in bounds.windows(2) {
            assert!((pair[1] / pair[0] - 2.0).abs() < 1e-9, "{pair:?}");
        }
        checked += 1;
    }
    assert_eq!(checked, 2, "requests of the kernel and of the remote");
}

fn errors_name_the_tier_that_had_the_bytes(mode: Mode) {
    let place = Place::new(mode, &[]);
    let errors = |place: &Place, tier| {
        place.mount.metric(&format!("kvfs_checksum_errors_total{{tier=\"{tier}\"}}"))
    };
    let files = place.write("f", 1);
    let path = &files[0].0;
    printed(&kvfs(&["sync", "--remote"], &[place.mount.path()]));
    printed(&kvfs(&["evict"], &[path]));
    for blob in crate::common::mount::files_below(&place.remote) {
        let bytes = fs::read(&blob).unwrap();
        if bytes.len() > 1 << 20 {
            let mut damaged = bytes;
            damaged[99] ^= 0x80;
            fs::write(&blob, damaged).unwrap();
        }
    }
    assert_errno(open(path, libc::O_RDONLY), libc::EIO);
    assert_eq!((errors(&place, "remote"), errors(&place, "ssd")), (1, 0));
}
