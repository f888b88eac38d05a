//! `kvfs map`: where pages are, without opening one.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::common::{Mode, Model, Mount, eventually, forks, mount, sys};
use crate::{complaint, kvfs, printed};

in_both_modes!(a_sequence_is_drawn_without_opening_it);
in_served_mode!(a_model_has_a_row_for_each_sequence, pictures_replace_nothing_unasked);
as_root!((fuse, root, setpriv) others_see_no_more_than_each_file_tells_them);

/// A sequence of two layers, of which the second lacks a page.
fn written(mount: &Mount, name: &str, pages: u64) -> (Model, Vec<PathBuf>) {
    let model = Model::small();
    if !model.directory(mount).exists() {
        model.install(mount);
    }
    let tokens = u64::from(model.page_tokens());
    let places = (0..2).flat_map(|layer| (0..pages).map(move |n| (layer, n * tokens)));
    let places = places.filter(|place| *place != (1, tokens));
    let paths = places.map(|(layer, start)| {
        let path = model.page_path(mount, name, layer, start);
        sys::write_and_close(&path, &model.page(layer, start, start)).unwrap();
        path
    });
    let paths = paths.collect();
    (model, paths)
}

fn a_sequence_is_drawn_without_opening_it(mode: Mode) {
    let remote = mount::scratch_directory();
    let mount = Mount::with_options(mode, &["--remote", remote.path().to_str().unwrap()]);
    let (model, paths) = written(&mount, "chat", 4);
    forks::succeed(
        std::process::Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("sync").arg(mount.path()),
    );
    printed(&kvfs(&["evict"], &[&paths[3]]));
    sys::setxattr(&paths[0], "user.kvfs.pin", b"1").unwrap();
    let (opens, opened) = (mount.metric("kvfs_opens_total"), || {
        mount.metric("kvfs_fuse_requests_total{op=\"getxattr\",result=\"ok\"}")
    });
    let asked = opened();
    let sequence = model.sequence(&mount, "chat");
    let text = printed(&kvfs(&["map"], &[&sequence]));
    assert!(text.contains("2 layers by 4 pages of "), "{text}");
    assert!(text.contains("\n000            Dddr\n001            d.dd\n"), "{text}");
    for line in
        ["r only in the remote           1 page ", ". absent                       1 page\n"]
    {
        assert!(text.contains(line), "{text}");
    }
    assert!(text.contains("capital: 1 page is pinned\n"), "{text}");
    // One request for each layer; the manifest alone is opened.
    assert!(opened() - asked <= 4, "{} attributes", opened() - asked);
    assert!(mount.metric("kvfs_opens_total") - opens <= 3);
    let map: Value =
        serde_json::from_str(&printed(&kvfs(&["map", "--json"], &[&sequence]))).unwrap();
    let page = &map["layers"][0]["pages"][3];
    let start = 3 * u64::from(model.page_tokens());
    assert_eq!((&page["place"], &page["start"]), (&"remote".into(), &start.into()));
    assert_eq!(map["layers"][0]["pages"][0]["pinned"], true);
    // It still is only there.
    assert_eq!(sys::getxattr(&paths[3], "user.kvfs.tier").unwrap(), "remote");
}

fn a_model_has_a_row_for_each_sequence(mode: Mode) {
    let mount = Mount::new(mode);
    let (model, _) = written(&mount, "a", 3);
    written(&mount, "b", 600);
    let text = printed(&kvfs(&["map"], &[&model.directory(&mount)]));
    assert!(text.contains("2 sequences by 600 pages of "), "{text}");
    // More than one answer has: nothing is lost between them.
    assert!(text.contains(" 1204 pages  "), "{text}");
    assert!(text.contains("one cell is up to 20 pages"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let line = complaint(&kvfs(&["map"], &[&mount.files("")]));
    assert!(line.contains("is neither a sequence nor a model: name models/NAME"), "{line}");
    let line = complaint(&kvfs(&["map"], &[std::path::Path::new("/")]));
    assert!(line.contains("is not in a mount of kvfs"), "{line}");
}

fn pictures_replace_nothing_unasked(mode: Mode) {
    let mount = Mount::new(mode);
    let (model, _) = written(&mount, "a", 3);
    let sequence = model.sequence(&mount, "a");
    let picture = mount.beside("map.svg");
    let draw = |words: &[&str]| {
        kvfs(&[&["map", "--svg", picture.to_str().unwrap()], words].concat(), &[&sequence])
    };
    printed(&draw(&[]));
    let svg = fs::read_to_string(&picture).unwrap();
    assert_eq!(svg.matches("fill=\"#1f77b4\" fill-opacity").count(), 5, "{svg}");
    fs::write(&picture, "mine").unwrap();
    let line = complaint(&draw(&[]));
    assert_eq!(line, format!("kvfs: {} is there: --force replaces it\n", picture.display()));
    assert_eq!(fs::read_to_string(&picture).unwrap(), "mine");
    printed(&draw(&["--force"]));
    assert_eq!(fs::read_to_string(&picture).unwrap(), svg);
    let pixels = mount.beside("map.png");
    printed(&kvfs(&["map", "--png", pixels.to_str().unwrap()], &[&sequence]));
    let file = fs::read(&pixels).unwrap();
    assert!(file.starts_with(b"\x89PNG\r\n\x1a\n"));
    // The palette has the colour of the disk, and both pictures cannot be asked for at once.
    assert!(file.windows(3).any(|colour| colour == [0x1f, 0x77, 0xb4]));
    let both = draw(&["--png", pixels.to_str().unwrap()]);
    assert_eq!(both.status.code(), Some(2));
}

fn others_see_no_more_than_each_file_tells_them(mode: Mode) {
    use std::os::unix::fs::PermissionsExt;
    const NOBODY: u32 = 65534;
    let mount = Mount::new(mode);
    let (model, paths) = written(&mount, "a", 2);
    let allow = |path: &std::path::Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    allow(mount.path().parent().unwrap(), 0o755);
    allow(&paths[0], 0o600);
    allow(&paths[1], 0o644);
    let layer = paths[0].parent().unwrap();
    let ask = |name: &str| {
        let script =
            format!("getfattr --absolute-names --only-values -n {name} {} 2>&1", layer.display());
        let ended = forks::output(&mut forks::shell_as(std::path::Path::new("/"), NOBODY, &script));
        String::from_utf8(ended.stdout).unwrap()
    };
    let told = eventually("both pages", || {
        let told = ask("user.kvfs.pages");
        (told.lines().count() == 3).then_some(told)
    });
    let mut lines: Vec<_> =
        told.lines().map(|line| line.split(' ').take(3).collect::<Vec<_>>()).collect();
    lines.sort();
    assert_eq!(lines[0][1..], ["hidden", "hidden"], "{told}");
    assert_eq!(lines[1][1..], ["ssd", "raw"], "{told}");
    // Sizes and times take entering the directory.
    allow(layer, 0o744);
    assert!(ask("user.kvfs.pages").contains("not permitted"), "{}", ask("user.kvfs.pages"));
    assert!(ask("user.kvfs.pages.x").contains("No such attribute"));
    allow(model.directory(&mount).as_path(), 0o755);
}
