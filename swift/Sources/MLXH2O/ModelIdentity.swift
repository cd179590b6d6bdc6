import MLX

/// What tells models apart without reading their weights.
struct ModelIdentity: Sendable, Equatable {
    /// As in the model's config.
    let modelType: String
    /// KV heads of each bounded layer.
    let kvHeads: [Int]
    /// D of each bounded layer.
    let keyWidths: [Int]
    /// Rows of the embedding, 0 if unknown.
    let vocabularySize: Int
    /// A few entries of the embedding.
    let probe: [Double]

    // Two models are taken for the same when their probes point the same way: quantizing a model
    // moves it by a percent or two, another training run turns it anywhere.
    private static let leastLikeness = 0.9

    /// Why the other is another model, or nil if it is not.
    func difference(from other: ModelIdentity) -> String? {
        if modelType != other.modelType { return "its type is \(other.modelType)" }
        if kvHeads != other.kvHeads { return "its KV heads are \(other.kvHeads)" }
        if keyWidths != other.keyWidths { return "its key widths are \(other.keyWidths)" }
        if vocabularySize != other.vocabularySize {
            return "its vocabulary has \(other.vocabularySize) tokens"
        }
        func length(_ probe: [Double]) -> Double { probe.reduce(0) { $0 + $1 * $1 }.squareRoot() }
        let product = zip(probe, other.probe).reduce(0) { $0 + $1.0 * $1.1 }
        let likeness = product / max(length(probe) * length(other.probe), 1e-12)
        let differs = probe.count != other.probe.count || !(likeness >= Self.leastLikeness)
        return !probe.isEmpty && differs ? "its embedding differs" : nil
    }
}

/// A model that profiles can be told apart by.
public protocol H2OProfiledModel {
    /// As in the model's config.
    var modelType: String { get }
    /// Rows of the embedding.
    var vocabularySize: Int { get }
    /// Embeddings `[L, width]` of tokens `[L]`.
    func embedded(_ tokens: MLXArray) -> MLXArray
}
