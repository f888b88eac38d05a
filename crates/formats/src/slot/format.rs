//! What a slot file must say of its rows for them to be those of a model's pages.

use super::Version;
use super::caches::Caches;
use crate::types;
use kvfs_page::{Geometry, KvRotation, Manifest};

/// The engine multiplies K and V of quantised caches with a Hadamard matrix of so many elements, where
/// heads are a multiple of it; of K with the largest power of two that divides them.
const ROTATION_MIN: u32 = 64;

/// The rows of a model in slot files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Format {
    /// All that the model has.
    pub(super) layers: u32,
    /// Which of them stand where.
    pub(super) caches: Caches,
    /// The number of the dtype in ggml.
    pub(super) kind: i32,
    /// Bytes of K and of V of one token of a layer.
    pub(super) row_bytes: [u64; 2],
    /// Bytes of an element; nothing where a block of them has one scale.
    pub element_bytes: Option<u32>,
    /// Elements of K and of V that are rotated together; 0: none.
    pub(super) rotation: [u32; 2],
    /// Whether the manifest says whether rows are rotated.
    is_rotation_told: bool,
}

/// What a file says of how its rows are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ToldRotation {
    /// Nothing: it is of version 3.
    Untold,
    /// Elements of K and of V that are rotated together; 0: none.
    Elements([u32; 2]),
}

impl Format {
    /// # Errors
    /// The end of a line about a slot file that says why there can be none.
    pub fn new(manifest: &Manifest) -> Result<Self, String> {
        let geometry = manifest.geometry();
        let caches = Caches::of(manifest)?;
        if geometry.v_head_dim() == 0 && !caches.rows.is_empty() {
            return Err("has V, the manifest's model has none".to_owned());
        }
        let dtype = geometry.dtype();
        let kind = types::of_dtype(dtype);
        let kind = kind.ok_or_else(|| format!("cannot be pages of {dtype}"))?;
        let heads = u64::from(geometry.num_kv_heads());
        let told = manifest.fields().kv_rotation.as_ref();
        Ok(Self {
            layers: geometry.num_layers(),
            caches,
            kind,
            row_bytes: [geometry.k_row_bytes(), geometry.v_row_bytes()].map(|bytes| heads * bytes),
            element_bytes: (dtype.block_elements() == 1).then(|| dtype.block_bytes()),
            rotation: rotation(geometry, told)?,
            is_rotation_told: told.is_some(),
        })
    }

    /// The same for files of a version that kvfs makes.
    ///
    /// # Errors
    /// As [`Format::new`].
    pub fn of_version(manifest: &Manifest, version: Version) -> Result<Self, String> {
        let format = Self::new(manifest)?;
        let told = match version {
            Version::Three => ToldRotation::Untold,
            Version::Four => ToldRotation::Elements(format.rotation),
        };
        format.check_rotation(told).map(|()| format)
    }

    /// Whether there is nothing but rows of all tokens in all layers.
    pub fn is_plain(&self) -> bool {
        self.caches.is_plain()
    }

    /// The caches that a file has.
    pub fn caches(&self) -> &Caches {
        &self.caches
    }

    /// Compares the rotation with what a file says.
    ///
    /// # Errors
    /// As [`Format::new`].
    pub(super) fn check_rotation(&self, told: ToldRotation) -> Result<(), String> {
        let create = "make the model with kvfs create --kv-rotation";
        match told {
            ToldRotation::Elements(found) if found != self.rotation => {
                let ([k, v], [expected_k, expected_v]) = (found, self.rotation);
                Err(format!(
                    "has {k} elements of K and {v} of V rotated together, the manifest \
                     {expected_k} and {expected_v}: {create} {}",
                    found != [0, 0]
                ))
            }
            ToldRotation::Untold if self.element_bytes.is_none() && !self.is_rotation_told => {
                Err(format!(
                    "does not say whether its quantised rows are rotated: {create} true (as the \
                     engine does unless told otherwise, where heads are a multiple of \
                     {ROTATION_MIN}) or false"
                ))
            }
            ToldRotation::Elements(_) | ToldRotation::Untold => Ok(()),
        }
    }

    /// Numbers of the rotation that the head of a version has.
    pub(super) fn rotation_of(&self, version: Version) -> &[u32] {
        match version {
            Version::Three => &[],
            Version::Four => &self.rotation,
        }
    }
}

/// Elements of K and of V that are rotated together.
fn rotation(geometry: &Geometry, told: Option<&KvRotation>) -> Result<[u32; 2], String> {
    let rotated = |elements: u32| elements.is_multiple_of(ROTATION_MIN);
    match told {
        None | Some(KvRotation::Flag(false)) => Ok([0, 0]),
        Some(KvRotation::Flag(true)) => {
            let (k, v) = (geometry.head_dim(), geometry.v_head_dim());
            let k = if rotated(k) { 1 << k.trailing_zeros() } else { 0 };
            Ok([k, if rotated(v) { ROTATION_MIN } else { 0 }])
        }
        Some(KvRotation::Named(name)) => {
            Err(format!("cannot be rows of a model whose kv_rotation is {name}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ToldRotation::{Elements, Untold};
    use super::*;
    use kvfs_page::{Dtype, ManifestFields};

    fn format(dtype: Dtype, head_dim: u32, told: Option<KvRotation>) -> Result<Format, String> {
        let fields = ManifestFields::new("m", dtype, 2, 2, head_dim);
        Format::new(&Manifest::new(ManifestFields { kv_rotation: told, ..fields }).unwrap())
    }

    #[test]
    fn the_rotation_that_the_engine_takes() {
        let check = |head_dim, expected| {
            let format = format(Dtype::Q8_0, head_dim, Some(KvRotation::Flag(true))).unwrap();
            assert_eq!(format.rotation, expected, "{head_dim}");
            assert_eq!(format.check_rotation(Elements(expected)), Ok(()));
            assert!(format.check_rotation(Elements([1, 1])).is_err());
            assert_eq!(format.check_rotation(Untold), Ok(()));
        };
        check(64, [64, 64]);
        check(128, [128, 64]);
        check(192, [64, 64]);
        check(256, [256, 64]);
        check(96, [0, 0]);
    }

    #[test]
    fn quantised_rows_are_taken_only_from_who_says_whether_they_are_rotated() {
        let untold = format(Dtype::Q4_0, 64, None).unwrap();
        assert!(untold.check_rotation(Untold).unwrap_err().contains("--kv-rotation true"));
        assert_eq!(untold.check_rotation(Elements([0, 0])), Ok(()));
        let rotated = untold.check_rotation(Elements([64, 64])).unwrap_err();
        assert!(rotated.contains("kvfs create --kv-rotation true"), "{rotated}");
        assert_eq!(format(Dtype::F16, 64, None).unwrap().check_rotation(Untold), Ok(()));
        let named = KvRotation::Named("random".to_owned());
        assert!(format(Dtype::Q8_0, 64, Some(named)).unwrap_err().contains("random"));
        assert!(format(Dtype::F8E4m3, 64, None).unwrap_err().contains("cannot be pages of"));
    }
}
