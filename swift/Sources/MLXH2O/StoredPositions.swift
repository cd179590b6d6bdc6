import MLX

/// Positions of slots: 16 bits each while a conversation has no more of them, then 32.
///
/// Signed, since a pinned token's position is stored as its complement. Only what a store keeps is
/// narrow; views of it, and everything that reckons with positions, are int32.
enum StoredPositions {
    /// Tokens of a conversation whose positions fit into 16 bits.
    static let few = 1 << 15
    static let narrow = DType.int16
    static let wide = DType.int32

    /// In what a store keeps the positions of so many tokens.
    static func dtype(of tokens: Int) -> DType { tokens <= few ? narrow : wide }
}
