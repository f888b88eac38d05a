//! What is refused, with which errno, and what `.kvfs/errors` says about it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use kvfs::page::{
    Checksum, Declared, Dtype, Layer, LayerKind, ModelIdentity, TokenStart, pack_rows,
};

use crate::common::sys::{assert_errno, open, rename, write_and_close};
use crate::common::{Mode, Model, Mount};

in_both_modes!(
    pages,
    pages_in_the_wrong_place,
    manifests,
    a_missing_manifest,
    odd_names,
    links,
    moving_pages,
);

/// The directory of layer 0 of the sequence `chat`.
const LAYER: &str = "models/small/sequences/chat/000";

/// Asserts that there is exactly one error line since `before`, which names `path` and says `why`.
#[track_caller]
fn one_line(mount: &Mount, before: &[String], path: &str, why: &str) {
    let errors = mount.errors();
    assert_eq!(errors.len(), before.len() + 1, "{errors:#?}");
    let line = errors.last().unwrap();
    assert!(line.contains(&format!("{path}: ")), "no {path} in: {line}");
    assert!(line.contains(why), "no {why:?} in: {line}");
    let time: f64 = line.split(' ').next().unwrap().parse().unwrap();
    assert!(time > 1e9, "{line}");
    assert!(line.len() < 1000 && !line.contains('\u{1b}'), "{line}");
}

/// A safetensors file with this header text, and a payload.
fn with_header(json: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut file = 4088_u64.to_le_bytes().to_vec();
    file.extend_from_slice(json);
    file.resize(4096, b' ');
    file.extend_from_slice(payload);
    file
}

/// A header of the small model's tensors.
fn tensors(k: &str, v: &str) -> Vec<u8> {
    format!("{{\"k\":{k},\"v\":{v}}}").into_bytes()
}

const K: &str = r#"{"dtype":"F16","shape":[2,32,16],"data_offsets":[0,2048]}"#;
const V: &str = r#"{"dtype":"F16","shape":[2,32,16],"data_offsets":[2048,4096]}"#;

/// A file that is no page, what is wrong with it, and a word of the reason that is given.
type Broken = (&'static str, Vec<u8>, &'static str);

/// Everything that is no page.
fn broken_pages(model: &Model) -> Vec<Broken> {
    let mut all = broken_files(model);
    all.extend(broken_headers(model));
    all.extend(broken_tensors(model));
    all.extend(broken_declarations(model));
    all
}

/// Files of a wrong length.
fn broken_files(model: &Model) -> Vec<Broken> {
    let good = model.page(0, 0, 1);
    vec![
        ("empty", Vec::new(), "0 bytes"),
        ("one byte", vec![1], "1 bytes"),
        ("header only", good[..4096].to_vec(), "4096 bytes"),
        ("cut in the header", good[..100].to_vec(), "100 of 4096 bytes"),
        ("cut by one", good[..8191].to_vec(), "8191 bytes"),
        ("one too many", [&good[..], &[0]].concat(), "8193 bytes"),
        ("padded with zeros", [&good[..], &[0; 4096]].concat(), "12288 bytes"),
        ("all zeros", vec![0; 8192], ""),
    ]
}

/// Headers that are none.
fn broken_headers(model: &Model) -> Vec<Broken> {
    let good = model.page(0, 0, 1);
    let payload = &good[4096..];
    let length = |length: u64| [&length.to_le_bytes(), &good[8..]].concat();
    let mut zeros = with_header(&tensors(K, V), payload);
    zeros[8 + tensors(K, V).len()..4096].fill(0);
    vec![
        ("no JSON", with_header(b"garbage", payload), ""),
        ("an array", with_header(b"[]", payload), ""),
        ("not UTF-8", with_header(b"{\"\xff\":1}", payload), ""),
        ("JSON padded with zeros", zeros, ""),
        ("length 0", length(0), ""),
        ("length too small", length(100), ""),
        ("length too large", length(4096), ""),
        ("length enormous", length(u64::MAX), ""),
    ]
}

/// Tensors that are not those of the model.
fn broken_tensors(model: &Model) -> Vec<Broken> {
    let good = model.page(0, 0, 1);
    let payload = &good[4096..];
    let json = |text: &str| with_header(text.as_bytes(), payload);
    let k = |from: &str, to: &str| with_header(&tensors(&K.replace(from, to), V), payload);
    let v = |from: &str, to: &str| with_header(&tensors(K, &V.replace(from, to)), payload);
    let extra = format!("{{\"k\":{K},\"v\":{V},\"w\":{V}}}");
    let without_v = format!("{{\"k\":{K}}}");
    let twice = format!("{{\"k\":{K},\"k\":{K},\"v\":{V}}}");
    let enormous = "[2,18446744073709551615,16]";
    vec![
        ("no tensors", json("{}"), "k"),
        ("no v", json(&without_v), "v"),
        ("a third tensor", json(&extra), "w"),
        ("k twice", json(&twice), "k"),
        ("wrong dtype", k("F16", "BF16"), "BF16"),
        ("wrong dtype of v", v("F16", "F32"), "F32"),
        ("unknown dtype", k("F16", "Q9"), "Q9"),
        ("other layout", k("[2,32,16]", "[32,2,16]"), "[32, 2, 16]"),
        ("too many heads", k("[2,32,16]", "[4,16,16]"), "k"),
        ("two dimensions", k("[2,32,16]", "[2,512]"), "k"),
        ("no tokens", k("[2,32,16]", "[2,0,16]"), ""),
        ("too many tokens", k("[2,32,16]", "[2,64,16]"), ""),
        ("negative", k("[2,32,16]", "[2,-32,16]"), ""),
        ("overflowing", k("[2,32,16]", enormous), ""),
        ("tokens of v differ", v("[2,32,16]", "[2,16,16]"), "v"),
        ("overlapping", v("[2048,4096]", "[1024,3072]"), "v"),
        ("a gap", v("[2048,4096]", "[2056,4104]"), "v"),
        ("backwards", v("[2048,4096]", "[4096,2048]"), "v"),
        ("past the end", v("[2048,4096]", "[2048,1000000]"), "v"),
    ]
}

/// Pages that say something untrue about themselves.
fn broken_declarations(model: &Model) -> Vec<Broken> {
    let good = model.page(0, 0, 1);
    let rows = model.rows(1, 32);
    let with = |change: &dyn Fn(&mut Declared)| {
        let mut declared = Declared::default();
        change(&mut declared);
        let metadata = declared.to_metadata();
        pack_rows(model.manifest.geometry(), &rows, 32, &metadata).unwrap()
    };
    let checksum = with(&|declared| declared.checksum = Some(Checksum([7; 16])));
    let other_model = with(&|declared| declared.model = Some(ModelIdentity([7; 16])));
    let other_layer = with(&|declared| declared.layer = Some(Layer(1)));
    let no_layer = with(&|declared| declared.layer = Some(Layer(7)));
    let other_start = with(&|declared| declared.start = Some(TokenStart(64)));
    let metadata = "\"__metadata__\":{\"kvfs.checksum\":\"x\\u001b[31m\\n\"}";
    let text = format!("{{{metadata},\"k\":{K},\"v\":{V}}}");
    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    vec![
        ("damaged", flipped, "kvfs.checksum"),
        ("with another checksum", checksum, "kvfs.checksum 0707"),
        ("of another model", other_model, "kvfs.model 0707"),
        ("of another layer", other_layer, "kvfs.layer 1"),
        ("of a layer that is not", no_layer, "kvfs.layer 7"),
        ("of another start", other_start, "kvfs.start 64"),
        (
            "with a checksum that is none",
            with_header(text.as_bytes(), &good[4096..]),
            "kvfs.checksum",
        ),
    ]
}

fn pages(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let path = model.page_path(&mount, "chat", 0, 0);
    let name = format!("{LAYER}/0000000.safetensors");
    for (what, bytes, why) in broken_pages(&model) {
        // Written in place.
        let before = mount.errors();
        let outcome = write_and_close(&path, &bytes);
        assert!(outcome.is_err(), "accepted: {what}");
        assert_errno(outcome, libc::EINVAL);
        assert_errno(std::fs::metadata(&path), libc::ENOENT);
        one_line(&mount, &before, &name, why);
        // By rename: the bytes stay under the temporary name.
        let temporary = path.with_file_name(".page.tmp");
        write_and_close(&temporary, &bytes).unwrap();
        let before = mount.errors();
        assert_errno(rename(&temporary, &path), libc::EINVAL);
        assert_errno(std::fs::metadata(&path), libc::ENOENT);
        one_line(&mount, &before, &name, why);
        assert!(std::fs::read(&temporary).unwrap() == bytes, "{what}");
        std::fs::remove_file(&temporary).unwrap();
    }
    assert_eq!(mount.status("pages"), "0");
    // A good page is not harmed by what the name was tried with.
    let page = model.page(0, 0, 1);
    write_and_close(&path, &page).unwrap();
    for (what, bytes, _) in broken_pages(&model) {
        write_and_close(mount.files("bad"), &bytes).unwrap();
        assert_errno(rename(mount.files("bad"), &path), libc::EINVAL);
        assert!(std::fs::read(&path).unwrap() == page, "{what}");
        std::fs::remove_file(mount.files("bad")).unwrap();
    }
}

fn pages_in_the_wrong_place(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::with(|fields| {
        fields.num_layers = 3;
        fields.layers = Some(vec![
            LayerKind::Attention,
            LayerKind::Sliding { window: 64 },
            LayerKind::Recurrent,
        ]);
    });
    model.install(&mount);
    let rows = model.rows(1, 32);
    let page = pack_rows(model.manifest.geometry(), &rows, 32, &kvfs::page::Metadata::new());
    let page = page.unwrap();
    let check = |layer: u32, start: u64, why: &str| {
        let path = model.page_path(&mount, "chat", layer, start);
        let name = path.strip_prefix(mount.path()).unwrap();
        let name = name.to_str().unwrap();
        let before = mount.errors();
        assert_errno(write_and_close(&path, &page), libc::EINVAL);
        one_line(&mount, &before, name, why);
        write_and_close(mount.files("page"), &page).unwrap();
        let before = mount.errors();
        assert_errno(rename(mount.files("page"), &path), libc::EINVAL);
        one_line(&mount, &before, name, why);
        std::fs::remove_file(mount.files("page")).unwrap();
    };
    check(0, 1, "no page starts at token 1");
    check(0, 33, "no page starts at token 33");
    check(2, 0, "layer 2 is recurrent");
    check(3, 0, "num_layers 3");
    check(1000, 0, "layer 1000 does not exist");
    check(0, 1 << 41, "the limit is");
    // An undeclared page may stand anywhere it fits.
    let path = model.page_path(&mount, "chat", 1, 64);
    write_and_close(&path, &page).unwrap();
    assert!(path.exists());
}

fn manifests(mode: Mode) {
    let mount = Mount::new(mode);
    let good = Model::small().manifest.to_json();
    let change = |from: &str, to: &str| {
        assert!(good.contains(from), "{good}");
        good.replace(from, to).into_bytes()
    };
    let directory = mount.join("models/small");
    std::fs::create_dir(&directory).unwrap();
    let path = directory.join("manifest.json");
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (Vec::new(), ""),
        (b"{}".to_vec(), "schema_version"),
        (b"not json".to_vec(), ""),
        (good.as_bytes()[..good.len() / 2].to_vec(), ""),
        (vec![b' '; 2 << 20], ""),
        (change("\"schema_version\": 1", "\"schema_version\": 2"), "newer kvfs"),
        (change("\"schema_version\": 1", "\"schema_version\": 0"), "schema_version"),
        (change("\"num_layers\": 2", "\"num_layers\": 0"), "num_layers"),
        (change("\"num_layers\": 2", "\"num_layers\": 5000"), "num_layers"),
        (change("\"head_dim\": 16", "\"head_dim\": -1"), ""),
        (change("\"dtype\": \"f16\"", "\"dtype\": \"f17\""), "f17"),
        (change("\"dtype\": \"f16\"", "\"dtype\": \"q8_0\""), "head_dim"),
        (change("\"num_layers\": 2", "\"num_layers\": 2, \"layers\": [\"attention\"]"), "layers"),
    ];
    for (bytes, why) in cases {
        let text = String::from_utf8_lossy(&bytes[..bytes.len().min(300)]).into_owned();
        let before = mount.errors();
        let outcome = write_and_close(&path, &bytes);
        assert!(outcome.is_err(), "{text}");
        assert_errno(outcome, libc::EINVAL);
        assert_errno(std::fs::metadata(&path), libc::ENOENT);
        one_line(&mount, &before, "models/small/manifest.json", why);
        write_and_close(directory.join(".m"), &bytes).unwrap();
        let before = mount.errors();
        assert_errno(rename(directory.join(".m"), &path), libc::EINVAL);
        one_line(&mount, &before, "models/small/manifest.json", why);
        std::fs::remove_file(directory.join(".m")).unwrap();
    }
    write_and_close(&path, good.as_bytes()).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), good);
}

fn a_missing_manifest(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    let path = model.page_path(&mount, "chat", 0, 0);
    let page = model.page(0, 0, 1);
    let name = format!("{LAYER}/0000000.safetensors");
    let before = mount.errors();
    assert_errno(write_and_close(&path, &page), libc::EINVAL);
    one_line(&mount, &before, &name, "no manifest.json");
    write_and_close(mount.files("page"), &page).unwrap();
    let before = mount.errors();
    assert_errno(rename(mount.files("page"), &path), libc::EINVAL);
    one_line(&mount, &before, &name, "no manifest.json");
    let before = mount.errors();
    let tail = model.tail_path(&mount, "chat", 0, 32);
    assert_errno(open(&tail, libc::O_WRONLY | libc::O_CREAT), libc::EINVAL);
    one_line(&mount, &before, &format!("{LAYER}/0000032.tail"), "no manifest.json");

    // With the manifest everything is fine, also what was refused before.
    let manifest = model.directory(&mount).join("manifest.json");
    write_and_close(manifest, model.manifest.to_json().as_bytes()).unwrap();
    rename(mount.files("page"), &path).unwrap();
    assert!(std::fs::read(&path).unwrap() == page);
}

fn odd_names(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let names: [&[u8]; 8] = [
        b"new\nline",
        b"\xff\xfe invalid",
        b"\x1b[31mred",
        b" spaces ",
        b"-rf",
        b"quote\"'\\",
        "日本語".as_bytes(),
        &[b'x'; 255],
    ];
    for name in names {
        let name = OsStr::from_bytes(name);
        // As a sequence, with a good and a bad page.
        let layer = model.sequence(&mount, "x").with_file_name(name).join("000");
        std::fs::create_dir_all(&layer).unwrap();
        let path = layer.join("0000000.safetensors");
        let page = model.page(0, 0, 1);
        write_and_close(&path, &page).unwrap();
        assert!(std::fs::read(&path).unwrap() == page);
        let before = mount.errors();
        let bad = layer.join("0000032.safetensors");
        assert_errno(write_and_close(&bad, b"bad"), libc::EINVAL);
        one_line(&mount, &before, "/000/0000032.safetensors", "3 bytes");
        // As a file beside pages and elsewhere.
        for directory in [layer.as_path(), &mount.files("")] {
            let path = directory.join(name);
            write_and_close(&path, b"x").unwrap();
            let listed = std::fs::read_dir(directory).unwrap();
            assert!(listed.into_iter().any(|entry| entry.unwrap().path() == path));
            std::fs::remove_file(path).unwrap();
        }
    }
    let long = OsStr::from_bytes(&[b'x'; 256]);
    for directory in [mount.files(""), model.sequence(&mount, ""), mount.join("models")] {
        let path = directory.join(long);
        assert_errno(write_and_close(&path, b"x"), libc::ENAMETOOLONG);
        assert_errno(std::fs::create_dir(&path), libc::ENAMETOOLONG);
        assert_errno(std::fs::metadata(&path), libc::ENAMETOOLONG);
        assert_errno(symlink("x", &path), libc::ENAMETOOLONG);
    }
    write_and_close(mount.files("x"), b"x").unwrap();
    assert_errno(rename(mount.files("x"), mount.files(long)), libc::ENAMETOOLONG);
    assert_errno(std::fs::hard_link(mount.files("x"), mount.files(long)), libc::ENAMETOOLONG);
}

fn links(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let path = |sequence, layer, start| model.page_path(&mount, sequence, layer, start);
    let page = path("a", 0, 0);
    write_and_close(&page, &model.page(0, 0, 1)).unwrap();
    let check = |to: &Path, expected: i32| {
        assert_errno(std::fs::hard_link(&page, to), expected);
    };
    check(&path("b", 0, 0), 0);
    check(&path("b", 0, 32), libc::EPERM);
    check(&path("b", 1, 0), libc::EPERM);
    check(&path("b", 0, 0), libc::EEXIST);
    check(&model.tail_path(&mount, "b", 0, 32), libc::EPERM);
    check(&model.tokens_path(&mount, "b"), libc::EPERM);
    check(&mount.files("kept"), 0);
    let stat = std::fs::metadata(&page).unwrap();
    assert_eq!(stat.nlink(), 3);
    for other in [path("b", 0, 0), mount.files("kept")] {
        assert_eq!(std::fs::metadata(&other).unwrap().ino(), stat.ino());
        assert_errno(open(&other, libc::O_WRONLY), libc::EPERM);
    }
    // A page that got an ordinary name may come back to its place, and only there.
    assert_errno(std::fs::hard_link(mount.files("kept"), path("c", 0, 32)), libc::EPERM);
    std::fs::hard_link(mount.files("kept"), path("c", 0, 0)).unwrap();

    // An ordinary file never becomes a page by a link: somebody may still write to it.
    write_and_close(mount.files("page"), &model.page(0, 64, 1)).unwrap();
    let outcome = std::fs::hard_link(mount.files("page"), path("a", 0, 64));
    assert_errno(outcome, libc::EPERM);
    let manifest = model.directory(&mount).with_file_name("other");
    std::fs::create_dir(&manifest).unwrap();
    write_and_close(mount.files("m"), model.manifest.to_json().as_bytes()).unwrap();
    let outcome = std::fs::hard_link(mount.files("m"), manifest.join("manifest.json"));
    assert_errno(outcome, libc::EPERM);

    // The link count follows the names.
    std::fs::remove_file(&page).unwrap();
    std::fs::remove_file(mount.files("kept")).unwrap();
    assert_eq!(std::fs::metadata(path("b", 0, 0)).unwrap().nlink(), 2);
    assert!(std::fs::read(path("c", 0, 0)).unwrap() == model.page(0, 0, 1));
}

fn moving_pages(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let other = Model::with(|fields| fields.dtype = Dtype::Bf16).named("other");
    other.install(&mount);
    let page = model.page_path(&mount, "a", 0, 0);
    let bytes = model.page(0, 0, 1);
    write_and_close(&page, &bytes).unwrap();
    let check = |from: &Path, to: &Path, expected: i32| {
        assert_errno(rename(from, to), expected);
        if expected != 0 {
            assert!(std::fs::read(from).unwrap() == bytes);
        }
    };
    check(&page, &model.page_path(&mount, "a", 0, 32), libc::EPERM);
    check(&page, &model.page_path(&mount, "a", 1, 0), libc::EPERM);
    check(&page, &other.page_path(&mount, "a", 0, 0), libc::EPERM);
    check(&page, &model.tail_path(&mount, "a", 0, 0), libc::EPERM);
    let ino = std::fs::metadata(&page).unwrap().ino();
    let moved = model.page_path(&mount, "b", 0, 0);
    check(&page, &moved, 0);
    check(&moved, &mount.files("aside"), 0);
    assert_errno(open(mount.files("aside"), libc::O_WRONLY), libc::EPERM);
    check(&mount.files("aside"), &other.page_path(&mount, "b", 0, 0), libc::EPERM);
    check(&mount.files("aside"), &page, 0);
    assert_eq!(std::fs::metadata(&page).unwrap().ino(), ino);

    // Directories: a layer stays that layer, a sequence stays in its model.
    let sequence = model.sequence(&mount, "a");
    let refused = |from: &Path, to: &Path, expected: i32| assert_errno(rename(from, to), expected);
    refused(&sequence.join("000"), &sequence.join("001"), libc::EXDEV);
    refused(&sequence.join("000"), &sequence.join("layer"), libc::EXDEV);
    refused(&sequence, &mount.files("a"), libc::EXDEV);
    refused(&sequence, &other.sequence(&mount, "a2"), libc::EXDEV);
    refused(&sequence, &model.sequence(&mount, "c"), 0);
    let page = model.page_path(&mount, "c", 0, 0);
    assert_eq!(std::fs::metadata(&page).unwrap().ino(), ino);
    assert!(std::fs::read(&page).unwrap() == bytes);
    // The whole model may get another name.
    let renamed = mount.join("models/renamed");
    refused(&model.directory(&mount), &renamed, 0);
    let page = renamed.join("sequences/c/000/0000000.safetensors");
    assert_eq!(std::fs::metadata(&page).unwrap().ino(), ino);
    assert_eq!(mount.errors(), [] as [String; 0]);
}
