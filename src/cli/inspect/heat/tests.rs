//! Pictures and figures of pages whose values are known.

use half::{bf16, f16};

use super::drawing::draw;
use super::figures::{HeadFigures, PartFigures};
use super::*;
use crate::cli::arguments::InspectArguments;
use crate::cli::inspect::run;
use crate::cli::picture::Colour;
use crate::page::{
    Dtype, Layer, Layout, Manifest, ManifestFields, PagePlace, TokenStart, pack_page,
};
use crate::tier::encoding::Unsuitable;

const TOKENS: u32 = 16;

fn encoded(dtype: Dtype, value: f32) -> Vec<u8> {
    match dtype {
        Dtype::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::F32 => value.to_le_bytes().to_vec(),
        other => panic!("{other} is not written here"),
    }
}

/// A model with one page at token 16 of layer 0, by the value of a token, part, head and channel.
struct Cache {
    base: tempfile::TempDir,
}

impl Cache {
    fn new(
        (dtype, layout): (Dtype, Layout), (heads, channels): (u32, u32),
        value: impl Fn(u32, Part, u32, u32) -> f32,
    ) -> Cache {
        let base = tempfile::tempdir().unwrap();
        let mut fields = ManifestFields::new("m", dtype, 1, heads, channels);
        (fields.page_tokens, fields.layout) = (TOKENS, layout);
        let manifest = Manifest::new(fields).unwrap();
        let layer = base.path().join("sequences/chat/000");
        std::fs::create_dir_all(&layer).unwrap();
        std::fs::write(base.path().join("manifest.json"), manifest.to_json()).unwrap();
        let mut rows = Vec::new();
        for token in 0..TOKENS {
            for part in Part::BOTH {
                for head in 0..heads {
                    let row = (0..channels).map(|channel| value(token, part, head, channel));
                    rows.extend(row.flat_map(|value| encoded(dtype, value)));
                }
            }
        }
        let place = PagePlace::new(&manifest, Layer(0), TokenStart(16)).unwrap();
        let page = pack_page(&place, &rows, TOKENS).unwrap();
        std::fs::write(layer.join("0000016.safetensors"), page).unwrap();
        let whole_rows = manifest.geometry().row_bytes() * 2;
        let tail = &rows[..usize::try_from(whole_rows).unwrap() + 3];
        std::fs::write(layer.join("0000032.tail"), tail).unwrap();
        Cache { base }
    }

    fn page(&self) -> PathBuf {
        self.base.path().join("sequences/chat/000/0000016.safetensors")
    }

    fn figures(&self, part: Part) -> PartFigures {
        PartFigures::of(&PageValues::read(&self.page(), Away::Refuse).unwrap(), part)
    }

    fn picture(&self, heat: HeatArguments) -> Result<String, Failure> {
        let arguments = InspectArguments { json: true, heat, path: self.page() };
        run(&arguments).map(|report| report.text)
    }

    fn asked(&self, name: &str) -> HeatArguments {
        HeatArguments { heat: Some(self.base.path().join(name)), ..HeatArguments::default() }
    }
}

/// Channel 5 of head 1 of K is large; the rest lies between 0.5 and 1.5.
fn with_an_outlier(token: u32, part: Part, head: u32, channel: u32) -> f32 {
    let even = f32::from(u8::try_from((token * 31 + channel * 7) % 11).unwrap()) / 10.0 + 0.5;
    let sign = if (token + channel).is_multiple_of(2) { 1.0 } else { -1.0 };
    let is_large = part == Part::K && head == 1 && channel == 5;
    sign * even * if is_large { 40.0 } else { 1.0 }
}

fn check_close(found: f64, expected: f64) {
    assert!((found - expected).abs() <= expected * 1e-3, "{found} and not {expected}");
}

#[test]
fn figures_of_all_floats_and_both_layouts() {
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
        for layout in [Layout::Hnd, Layout::Nhd] {
            let cache = Cache::new((dtype, layout), (2, 32), with_an_outlier);
            let k = cache.figures(Part::K);
            let outliers: Vec<_> = k.heads.iter().map(|head| head.outliers.clone()).collect();
            assert_eq!(outliers, [vec![], vec![5]], "{dtype}");
            assert!(cache.figures(Part::V).heads.iter().all(|head| head.outliers.is_empty()));
            let errors = |head: &HeadFigures| head.errors.map(Result::unwrap);
            let (plain, large) = (errors(&k.heads[0]), errors(&k.heads[1]));
            // Half a step of 1/127 or 1/8 of the largest value, evenly spread.
            check_close_to_a_half(plain[0], 1.5 / 127.0 / 12_f64.sqrt());
            check_close_to_a_half(plain[1], 1.5 / 8.0 / 12_f64.sqrt());
            assert!(large[0] < large[1] && large.iter().all(|error| *error < 1.0));
            let norm = (0..32).map(|c| f64::from(with_an_outlier(3, Part::K, 0, c)).powi(2));
            let rounding = if dtype == Dtype::Bf16 { 4e-3 } else { 1e-3 };
            let norm = norm.sum::<f64>().sqrt();
            assert!((k.heads[0].norms[3] - norm).abs() < norm * rounding, "{dtype}");
        }
    }
}

/// Errors depend on how values fall between the steps.
#[track_caller]
fn check_close_to_a_half(found: f64, expected: f64) {
    assert!(found > expected / 2.0 && found < expected * 2.0, "{found} is far from {expected}");
}

#[test]
fn values_that_are_no_numbers_are_counted_and_drawn() {
    let cache = Cache::new((Dtype::F16, Layout::Hnd), (1, 64), |token, part, _, channel| {
        match (token, part, channel) {
            (3, Part::K, 10) => f32::NAN,
            (4, Part::K, 11 | 12) => f32::NEG_INFINITY,
            _ => 2.0,
        }
    });
    let figures = [cache.figures(Part::K), cache.figures(Part::V)];
    let k = &figures[0].heads[0];
    assert_eq!((k.not_finite, k.errors), (3, [Err(Unsuitable::NotFinite); 2]));
    check_close(k.largest.into(), 2.0);
    check_close(k.norms[4], (4.0_f64 * 62.0).sqrt());
    assert!(k.outliers.is_empty());
    assert!(figures[1].heads[0].errors.iter().all(|error| error.is_ok_and(|error| error < 1e-3)));
    let values = PageValues::read(&cache.page(), Away::Refuse).unwrap();
    let cell = 6 * 12;
    let legend = draw(&values, &figures).count(Colour::Alarm) - 3 * cell;
    assert!((1..4 * cell).contains(&legend), "{legend} pixels beside the cells");
    assert_eq!(draw(&values, &figures[1..]).count(Colour::Alarm), 0);
    let text = table(&figures);
    assert!(text.contains("k: 3 values are NaN or infinite\n"), "{text}");
    assert!(text.contains("-: NaN, infinite or very large values are not rounded\n"), "{text}");
}

#[test]
fn neighbours_share_a_cell_where_there_are_many() {
    let cache = Cache::new((Dtype::F32, Layout::Nhd), (65, 300), |token, _, head, channel| {
        if (token, head, channel) == (2, 64, 299) { -7.0 } else { 1.0 }
    });
    let k = cache.figures(Part::K);
    let cells = &k.heads[64].cells;
    assert_eq!((cells.columns, cells.channels_each, cells.tokens_each), (100, 3, 1));
    assert_eq!(cells.values.len(), 16 * 100);
    let large: Vec<_> = (0..1600).filter(|cell| cells.values[*cell] > 1.0).collect();
    assert_eq!(large, [2 * 100 + 99]);
    // 300 values are no whole blocks.
    assert_eq!(k.heads[0].errors, [Err(Unsuitable::RowLength); 2]);
}

#[test]
fn a_picture_is_a_new_file_that_is_described() {
    let cache = Cache::new((Dtype::F16, Layout::Hnd), (2, 64), with_an_outlier);
    let json: Value = serde_json::from_str(&cache.picture(cache.asked("a.png")).unwrap()).unwrap();
    assert_eq!(json["kind"], "page");
    assert_eq!(json["heat"]["k"][1]["outlier_channels"], json!([5]));
    assert_eq!(json["heat"]["v"][1]["norms"].as_array().unwrap().len(), 16);
    assert!(json["heat"]["v"][0]["error_q4_0"].as_f64().unwrap() > 0.01);
    let file = cache.base.path().join("a.png");
    let bytes = std::fs::read(&file).unwrap();
    assert!(bytes.starts_with(b"\x89PNG\r\n\x1a\n"));
    // It is there, and stays.
    let refused = cache.picture(cache.asked("a.png")).unwrap_err();
    assert!(refused.line().contains("a.png is there: --force replaces it"), "{refused:?}");
    let only_v = HeatArguments { part: Some(PartArgument::V), force: true, ..cache.asked("a.png") };
    let json: Value = serde_json::from_str(&cache.picture(only_v).unwrap()).unwrap();
    assert_eq!(json["heat"]["k"], Value::Null);
    assert!(std::fs::read(&file).unwrap().len() < bytes.len());
}

#[test]
fn what_cannot_be_drawn_is_refused() {
    let cache = Cache::new((Dtype::F16, Layout::Hnd), (1, 32), |_, _, _, _| 1.0);
    let to_output = HeatArguments { heat: Some("-".into()), ..HeatArguments::default() };
    assert!(matches!(cache.picture(to_output), Err(Failure::Usage(_))));
    for force in [false, true] {
        let device = HeatArguments { heat: Some("/dev/null".into()), force, part: None };
        let refused = cache.picture(device).unwrap_err();
        assert!(refused.line().contains("is no regular file"), "{refused:?}");
    }
    let draw = |path: &Path| {
        let arguments =
            InspectArguments { json: false, heat: cache.asked("b.png"), path: path.to_owned() };
        run(&arguments).map(|report| report.text).map_err(|failure| failure.line().to_owned())
    };
    let check = |path: &Path, expected: &str| {
        let refused = draw(path).unwrap_err();
        assert!(refused.contains(expected), "{refused}");
        assert!(!cache.base.path().join("b.png").exists());
    };
    check(&cache.base.path().join("manifest.json"), "header");
    check(cache.base.path(), "is no file: name a page or a tail");
    let alone = tempfile::tempdir().unwrap();
    let copy = alone.path().join("0000016.safetensors");
    std::fs::copy(cache.page(), &copy).unwrap();
    check(&copy, "no manifest.json above");
    // The whole rows of a tail are drawn.
    let text = draw(&cache.page().with_file_name("0000032.tail")).unwrap();
    assert!(text.contains("rows: 2\n") && text.contains("\nk       0  1.00   "), "{text}");
}
