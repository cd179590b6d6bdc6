import MLX

extension MLXArray {
    /// The entries `range` along an axis counted from the front.
    func sliced(_ range: Range<Int>, axis: Int) -> MLXArray {
        if range == 0 ..< dim(axis) { return self }
        return switch axis {
        case 0: self[range]
        case 1: self[0..., range]
        case 2: self[0..., 0..., range]
        default: self[0..., 0..., 0..., range]
        }
    }

    /// The entries `range` along the last axis.
    func slicedLast(_ range: Range<Int>) -> MLXArray {
        sliced(range, axis: ndim - 1)
    }

    /// `[..., 1]`
    var column: MLXArray { expandedDimensions(axis: -1) }

    var float32: MLXArray { dtype == .float32 ? self : asType(.float32) }
}

/// Integers `range` as an int32 vector.
func positions(_ range: Range<Int>) -> MLXArray {
    MLXArray(Int32(range.lowerBound) ..< Int32(range.upperBound))
}

/// Arrays one after the other along an axis; a single one as it is.
func joined(_ arrays: [MLXArray], axis: Int) -> MLXArray {
    arrays.count == 1 ? arrays[0] : concatenated(arrays, axis: axis)
}

/// An array with zeros before and after its entries along one axis.
func zeroPadded(_ array: MLXArray, axis: Int, before: Int, after: Int) -> MLXArray {
    var parts: [MLXArray] = []
    var shape = array.shape
    if before > 0 {
        shape[axis] = before
        parts.append(MLXArray.zeros(shape, dtype: array.dtype))
    }
    parts.append(array)
    if after > 0 {
        shape[axis] = after
        parts.append(MLXArray.zeros(shape, dtype: array.dtype))
    }
    return joined(parts, axis: axis)
}
