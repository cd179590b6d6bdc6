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

    var float32: MLXArray { dtype == .float32 ? self : asType(.float32) }
}
