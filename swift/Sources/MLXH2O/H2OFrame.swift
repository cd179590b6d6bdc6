import MLX

/// A layer's frame for packed keys: each channel's centre and scale, per KV head.
///
/// A few key channels carry large, constant offsets, and one of them in a group of 64 leaves the others
/// hardly a level. Keys enter a cache as k' = (k - centre) / scale, so that every channel fills its
/// group's range, and queries meet them as q' = scale q: q.k = q'.k' + q.centre, where the last term
/// is the same for every column of the softmax and so changes no output. Everything that a layer
/// holds (rows, remainder, saved files) is in its frame. Values need none. Related: SmoothAttention
/// (QServe, arXiv 2405.04532; a scale alone), KIVI, KVQuant.
package struct H2OFrame: Sendable, Equatable {
    /// A channel that never moves keeps a scale that can be divided by.
    package static let leastScale: Float = 1e-4

    /// Each channel's mean, `[H][D]`.
    package let centre: [[Float]]
    /// Each channel's greatest distance from its mean, `[H][D]`, above 0.
    package let scale: [[Float]]

    /// - Parameters:
    ///   - centre: Each channel's mean, `[H][D]`.
    ///   - scale: Each channel's greatest distance from it, `[H][D]`.
    /// - Throws: ``H2OError/configuration(_:)`` unless both have the same form, and their numbers are
    ///   finite, those of `scale` above 0.
    package init(centre: [[Float]], scale: [[Float]]) throws {
        guard let width = centre.first?.count, width > 0, centre.count == scale.count,
            (centre + scale).allSatisfy({ $0.count == width })
        else {
            throw H2OError.configuration(
                "A frame has a centre and a scale of equal forms: D numbers for each KV head.")
        }
        guard (centre + scale).joined().allSatisfy(\.isFinite),
            scale.joined().allSatisfy({ $0 > 0 })
        else {
            throw H2OError.configuration(
                "A frame's centre and scale are finite, and its scale is above 0.")
        }
        (self.centre, self.scale) = (centre, scale)
    }

    /// The frame of keys `[B, H, T, D]` as they are cached, with RoPE applied.
    ///
    /// It serves contexts of the positions that they have.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` for keys that are not finite, or none.
    package init(of keys: MLXArray) throws {
        guard keys.ndim == 4, keys.size > 0 else {
            throw H2OError.configuration("A frame is of keys [B, H, T, D]; got \(keys.shape).")
        }
        let keys = keys.asType(.float32)
        let centre = keys.mean(axes: [0, 2])
        let apart = abs(keys - centre.expandedDimensions(axis: 1)).max(axes: [0, 2])
        let arrays = FrameArrays(centre: centre, scale: maximum(apart, Self.leastScale))
        try self.init(arrays)
    }

    /// - Throws: ``H2OError/configuration(_:)`` for numbers that no frame has.
    init(_ arrays: FrameArrays) throws {
        func perHead(_ array: MLXArray) -> [[Float]] {
            let numbers = array.asArray(Float.self), width = array.dim(1)
            return (0 ..< array.dim(0)).map { Array(numbers[$0 * width ..< ($0 + 1) * width]) }
        }
        try self.init(centre: perHead(arrays.centre), scale: perHead(arrays.scale))
    }

    /// H.
    var heads: Int { centre.count }
    /// D.
    var width: Int { centre[0].count }

    /// The frame that the rows of saved arrays are in; nil where there is none.
    ///
    /// - Throws: ``H2OError/file(_:)`` for half of one, or arrays that are none.
    init?(saved arrays: [String: MLXArray]) throws {
        let parts = FrameArrays.names.map { arrays[$0] }
        if parts.allSatisfy({ $0 == nil }) { return nil }
        guard let centre = parts[0], let scale = parts[1], centre.ndim == 2, centre.size > 0,
            centre.shape == scale.shape, [centre, scale].allSatisfy({ $0.dtype == .float32 })
        else {
            throw H2OError.file("this is no state of an H2OKVCache: its frame is not whole.")
        }
        do {
            try self.init(FrameArrays(centre: centre, scale: scale))
        } catch {
            throw H2OError.file("this is no state of an H2OKVCache: \(error.localizedDescription)")
        }
    }
}

/// A layer's frame as arrays.
struct FrameArrays {
    /// In files.
    static let names = ["frame.centre", "frame.scale"]

    /// Means `[H, D]` float32.
    let centre: MLXArray
    /// Greatest distances `[H, D]` float32.
    let scale: MLXArray

    init(centre: MLXArray, scale: MLXArray) { (self.centre, self.scale) = (centre, scale) }

    init(_ frame: H2OFrame) {
        let shape = [frame.heads, frame.width]
        self.init(
            centre: MLXArray(Array(frame.centre.joined()), shape),
            scale: MLXArray(Array(frame.scale.joined()), shape))
    }

    /// In the order of ``names``.
    var arrays: [MLXArray] { [centre, scale] }
}
